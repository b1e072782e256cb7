"""Builds the package by maturin, on platforms on which outcore runs."""

import os
import platform
import sys


def unsupported() -> str | None:
    """What this platform is, if outcore does not run on it."""
    if platform.system() != "Linux":
        return {"Darwin": "macOS"}.get(platform.system(), platform.system())
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"Linux on {platform.machine()}"
    try:
        os.confstr("CS_GNU_LIBC_VERSION")
    except ValueError:
        return "Linux with another C library than glibc, such as musl"
    return None


if (found := unsupported()) is not None:
    sys.exit(f"outcore's package for Python is for Linux with glibc, on x86-64 or ARM: it cannot be built on {found}")

# What is built is stripped: line tables would be compiled only to be thrown away.
os.environ.setdefault("CARGO_PROFILE_RELEASE_DEBUG", "0")

# What pip calls. There is no archive of sources: the package is built in a checkout, or is a wheel.
from maturin import (  # noqa: E402
    build_editable,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]
