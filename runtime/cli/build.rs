//! Puts the library that `outcore run` loads into release builds of the program, so that an installed program is whole.
//! docs/decisions/0029-library-in-the-program.md says why it is done so.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// `0` leaves the library out.
const WANTED: &str = "OUTCORE_EMBED";

fn main() {
    println!("cargo::rustc-check-cfg=cfg(embedded)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={WANTED}");
    let released = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    if !released || env::var(WANTED).is_ok_and(|wanted| wanted == "0") {
        return;
    }
    let Some(root) = env::var_os("CARGO_MANIFEST_DIR").map(|here| Path::new(&here).join("../..")) else { return };
    // A packed crate has no other one beside it.
    if !root.join("runtime/preload/Cargo.toml").is_file() {
        return;
    }
    for source in ["runtime", "Cargo.toml", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={}", root.join(source).display());
    }
    match library(&root) {
        Ok(library) => {
            println!("cargo::rustc-cfg=embedded");
            println!("cargo::rustc-env=OUTCORE_EMBEDDED={}", library.display());
        }
        Err(why) => println!("cargo::warning=`outcore run` will look for its library beside the program: {why}"),
    }
}

fn library(root: &Path) -> Result<PathBuf, String> {
    let variable = |name: &str| env::var_os(name).ok_or_else(|| format!("{name} is not set"));
    let (cargo, target) = (variable("CARGO")?, variable("TARGET")?);
    let folder = PathBuf::from(variable("OUT_DIR")?).join("library");
    // The build that runs this one holds the lock on its own folder.
    let status = Command::new(cargo)
        .args(["build", "--release", "--package", "outcore-preload", "--target"])
        .arg(&target)
        .arg("--target-dir")
        .arg(&folder)
        .arg("--manifest-path")
        .arg(root.join("Cargo.toml"))
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        // Tools that stand before the compiler of this build do not compile.
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .status()
        .map_err(|cause| format!("cargo does not start: {cause}"))?;
    let library = folder.join(&target).join("release/liboutcore_preload.so");
    match (status.success(), library.is_file()) {
        (true, true) => Ok(library),
        (true, false) => Err(format!("cargo has not made {}", library.display())),
        (false, _) => Err("it does not compile".to_owned()),
    }
}
