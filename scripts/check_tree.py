#!/usr/bin/env python3
"""Checks what the compiler does not: where `unsafe` may stand, which file may name a processor, what the pager may use
of `std`, what the trainer may use of candle, what texts may say, how long lines are.

    check_tree.py               check the repository this script lies in
    check_tree.py --self-test   check that every rule can fail

A finding is one line, `path:line: rule: what`. The exit status is 1 if there is any.
"""

import functools
import os
import re
import subprocess
import sys
import tempfile

# ---- the lists; a change here is a decision and should be reviewed as one ----

# Where `unsafe` may stand, and why. A path ending in "/" is a folder.
UNSAFE_ALLOWED = {
    "runtime/outcore/device/": "reserves, maps and copies raw memory",
    "runtime/outcore/store/": "hands buffers to the kernel",
    "runtime/outcore/load/memory.rs": "has reads fill raw memory, which becomes tensors' bytes",
    "runtime/outcore/os/kernel_pages.rs": "asks the kernel for its page size",
    "runtime/outcore/os/limits.rs": "asks the kernel for limits",
    "runtime/outcore/os/process.rs": "has a page that is zeroed in children",
    "runtime/outcore/os/signals.rs": "blocks signals",
    "runtime/outcore/os/soon.rs": "asks the kernel to run a thread soon",
    "runtime/outcore/streams.rs": "adopts streams of the caller's, whose handles are raw pointers",
    "runtime/outcore/dlpack.rs": "gives other libraries a C structure, and takes it back in its deleter",
    "runtime/gpu/": "copies raw memory, and has a driver copy it",
    "runtime/cuda/": "calls the CUDA driver",
    "runtime/mapped/": "reserves raw memory, calls userfaultfd, and gives a file's pages as a slice",
    "runtime/preload/": "replaces functions of the C library: raw pointers from C, and calls of the kernel",
    "runtime/capi/": "reads what C lends for a call, and writes to the places that it names",
    "runtime/python/capsule.rs": "puts C structures into capsules, and takes back what nobody took",
    "tests/kit/hooked.rs": "hands on the adoption of a stream",
    "tests/kit/planted.rs": "hands calls on to the CUDA driver, but for those that a planted defect changes",
    "tests/soak/gpu.rs": "launches kernels, and has memory and streams of its own",
    "tests/kit/sim.rs": "a simulated device copies raw memory",
    "runtime/outcore/pin/": "pin guards turn a pinned page's address into a slice",
    "examples/candle.rs": "gives candle a pinned page's bytes as its blocks",
    "examples/memmap2.rs": "maps a file by memmap2, as engines do",
    "runtime/cli/tests/run/memmap.rs": "maps a file by memmap2, as engines do",
    "examples/own_device/src/lib.rs": "copies between raw host memory and its own",
    "examples/llm/src/kernels.rs": "vector instructions",
    "examples/llm/src/kernels/": "vector instructions: loads, stores and prefetches through references",
    "examples/llm/src/pool.rs": "lends a borrowed closure to the kernels' threads",
    "examples/llm/src/cuda/": "launches kernels on raw device addresses, and calls cuBLASLt",
    "examples/llm/tests/cuda/": "loads a cuBLASLt of the tests",
    "runtime/train/cuda.rs": "launches kernels on raw device addresses",
    "runtime/train/tests/cuda.rs": "trusts files of kernels, and changes a thread's context",
    "tests/kit/emulated_kernels.rs": "loads kernels that were compiled for the CPU, and calls its functions",
    "examples/llm/tests/cuda.rs": "asks the dynamic linker for NVRTC",
    "tests/fake-cublaslt/": "emulates a C library: pointers from C, and functions found by name",
    "tests/fake-cuda/": "emulates a C library: pointers from C, raw mappings, and the loading of it",
    "tests/device/cuda_rig.rs": "reads and writes the host slab's memory",
    "tests/device/pins_on_streams.rs": "launches kernels on streams of its own, and has them adopted",
    "tests/device/cuda_reaper.rs": "has streams of its own adopted",
    "tests/device/cuda_streams.rs": "launches kernels on streams of its own, and has them adopted",
    "tests/runtime/dlpack.rs": "reads and writes through C structures",
    "tests/kit/fake_cuda.rs": "calls the emulated driver's C functions",
    "tests/kit/cuda_calls.rs": "calls the CUDA driver's raw functions",
    "tests/device/emulator.rs": "launches kernels, and follows a device address to see the fault",
    "tests/device/emulator_judge.rs": "launches kernels and makes the raw driver calls that are wrong",
    "tests/device/suite.rs": "reads and writes device memory through raw addresses",
    "tests/store/model_changed.rs": "writes a file through a mapping, of which nobody is told",
    "tests/store/fallback.rs": "installs system-call filters",
    "tests/store/suite.rs": "owns the raw buffers the store reads into",
    "tests/runtime/concurrency.rs": "takes mappings until the kernel has none left",
    "runtime/pager/tests/pager/cost.rs": "counts what is allocated",
    "tests/fork/": "forks, and ends children",
    "tests/process/memory.rs": "asks the kernel what the page cache holds",
    "tests/process/mappings.rs": "takes mappings until few are left",
    "tests/runtime/strict.rs": "reads evicted addresses, to see the fault",
    "benches/gpu-check/src/cuda.rs": "calls the CUDA driver's and cuBLAS's raw functions",
    "benches/fault.rs": "moves and reads raw pages, beside which faults are measured",
    "benches/frame_moves.rs": "moves raw memory in both ways that are compared",
    "benches/host_map.rs": "maps and touches raw device addresses",
    "benches/mapped.rs": "maps a file as the kernel does, beside which mapped files are measured",
    "benches/store_latency.rs": "owns the raw buffers the store reads into",
}

# Which files may name a processor's architecture, and why: all others compile to the same everywhere.
ARCHITECTURE = re.compile(
    r"\b(?:target_arch|target_feature|is_\w+_feature_detected)\b|\b(?:std|core)\s*::\s*arch\b|\b(?:\w+_)?asm\s*!"
)
ARCHITECTURE_ALLOWED = {
    "examples/llm/src/kernels.rs": "vector instructions, chosen at run time, with a portable way beside them",
    "examples/llm/src/kernels/avx2.rs": "the same for one set of instructions",
    "examples/llm/src/kernels/avx512.rs": "the same for one set of instructions",
    "examples/llm/src/kernels/blocks.rs": "what these share: a prefetch",
    "examples/llm/src/kernels/elementwise.rs": "one function, compiled for each set of instructions",
    "runtime/cli/doctor.rs": "says whether the build has the vector instructions that the processor has",
}

# What runtime/pager may not use of std, and the file that may: the pager's errors are made of the system's. Its
# Cargo.toml says which crates it may use.
PAGER = "runtime/pager/"
PAGER_STD_BANNED = {"env", "fs", "io", "net", "os", "path", "process", "thread", "time"}
PAGER_STD_ALLOWED = {"runtime/pager/error.rs": {"io"}}

# What the trainer may not use of candle: these operations have no backward. What they are given gets no gradient, and
# no error says so.
TRAINER = "examples/train/"
NO_BACKWARD = re.compile(
    r"\b(?:rms_norm|layer_norm|softmax_last_dim|rope(?:_i|_thd)?|sdpa|QMatMul|apply_op[123]_no_bwd)\b"
    r"|\bcandle_nn\s*::\s*(?:ops|rotary_emb)\b"
)

# Characters beyond ASCII that sources and texts may hold.
CHARACTERS_ALLOWED = set("\u00b2\u00b3\u00b5\u00d7")  # superscript 2 and 3, micro, times
# Files whose subject is text beyond ASCII.
CHARACTERS_ANYTHING = ("examples/llm/src/tokenizer", "examples/llm/tests/")

# Words no file may hold, and what to do instead. A machine path betrays a machine; the others are unfinished or
# boastful.
BANNED = [
    (re.compile(r"(?<![\w.$}-])/(?:home|root|Users|work)/[\w.]"), "machine path: use a relative path or a temporary folder"),
    (re.compile(r"(?<![\w.$}-])/tmp/\w"), "machine path: ask for a temporary folder"),
    (re.compile(r"https?://(?!127\.)\d+\.\d+\.\d+\.\d+"), "address of a machine"),
    (re.compile(r"https?://[\w.-]+\.(?:internal|local|lan|corp)\b"), "address of a private host"),
    (re.compile(r"\b(?:TODO|FIXME|XXX)\b"), "unfinished: do it, or say in plain words what does not work"),
    (re.compile(r"\b(?:todo|unimplemented|dbg)!\("), "unfinished code"),
    (re.compile(r"\b(?:blazing|blazingly|seamless|seamlessly|lightning-fast|game-chang\w+)\b", re.I), "advertising: give a number"),
]
BANNED_EXEMPT = {"scripts/check_tree.py", "Cargo.lock", "LICENSE-APACHE", "LICENSE-MIT"}

# Columns of a line of these files. `columns` says what does not count.
COLUMNS_MOST = 120
COLUMNS_ENDINGS = (".rs", ".py", ".sh", ".md")

TEXT_ENDINGS = (".rs", ".py", ".sh", ".toml", ".md", ".yml", ".yaml", ".cu", ".c", ".cpp", ".h")
TEXT_NAMES = {"Makefile", ".ci/run", ".gitignore"}
BLOB_BYTES_MAX = 1 << 20
# Generated texts, whose own checks bound them.
BLOB_BYTES_OF = {"examples/llm/src/cuda/kernels.ptx": 3 << 19, "runtime/train/cuda/kernels.ptx": 1 << 16}

# ---- a small reader of Rust: blanks out what is not code, keeping line numbers ----


@functools.lru_cache(maxsize=None)
def split_rust(text):
    """(code, comments): `text` with comments and literals blanked, and `text` with all but comments blanked."""
    code, notes = list(text), [c if c == "\n" else " " for c in text]

    def blank(start, end, comment=False):
        for i in range(start, min(end, len(text))):
            if text[i] != "\n":
                code[i] = " "
                if comment:
                    notes[i] = text[i]

    i = 0
    while i < len(text):
        two = text[i : i + 2]
        if two == "//":
            end = text.find("\n", i)
            end = len(text) if end < 0 else end
            blank(i, end, comment=True)
            i = end
        elif two == "/*":
            depth, end = 1, i + 2
            while end < len(text) and depth:
                pair = text[end : end + 2]
                if pair == "/*":
                    depth, end = depth + 1, end + 2
                elif pair == "*/":
                    depth, end = depth - 1, end + 2
                else:
                    end += 1
            blank(i, end, comment=True)
            i = end
        elif (raw := re.compile(r'(?:b|c)?r(#*)"').match(text, i)) and not (i and (text[i - 1].isalnum() or text[i - 1] == "_")):
            close = '"' + raw.group(1)
            end = text.find(close, raw.end())
            end = len(text) if end < 0 else end + len(close)
            blank(i, end)
            i = end
        elif text[i] == '"':
            end = i + 1
            while end < len(text) and text[end] != '"':
                end += 2 if text[end] == "\\" else 1
            blank(i, end + 1)
            i = end + 1
        elif char := re.compile(r"'(?:\\(?:x[0-9a-fA-F]{2}|u\{[^}]*\}|.)|[^'\\\n])'").match(text, i):
            blank(i, char.end())
            i = char.end()
        else:
            i += 1
    return "".join(code), "".join(notes)


def line_of(text, position):
    return text.count("\n", 0, position) + 1


# ---- rules: each takes (path, text) and yields (line, what) ----


def unsafe_place(path, text):
    if not path.endswith(".rs") or any(path == a or (a.endswith("/") and path.startswith(a)) for a in UNSAFE_ALLOWED):
        return
    code, _ = split_rust(text)
    for hit in re.finditer(r"\bunsafe\b", code):
        yield line_of(code, hit.start()), "`unsafe` outside the places listed in scripts/check_tree.py"


def unsafe_reason(path, text):
    """Every unsafe block and impl has a SAFETY comment on its line or right above its statement."""
    if not path.endswith(".rs"):
        return
    code, notes = split_rust(text)
    code_lines, note_lines = code.split("\n"), notes.split("\n")
    for hit in re.finditer(r"\bunsafe\s*(?:\{|impl\b)", code):
        row = line_of(code, hit.start()) - 1
        if "SAFETY:" in note_lines[row] or (row + 1 < len(note_lines) and "SAFETY:" in note_lines[row + 1]):
            continue
        above, found = row - 1, False
        while above >= 0 and row - above <= 40:
            note, line = note_lines[above].strip(), code_lines[above].strip()
            if "SAFETY:" in note:
                found = True
                break
            if not note and not line:
                break
            if line and not line.startswith("#[") and line[-1] in ";}":
                break
            above -= 1
        if not found:
            yield row + 1, "unsafe without a SAFETY comment"


def architecture(path, text):
    if not path.endswith(".rs") or path in ARCHITECTURE_ALLOWED:
        return
    code, _ = split_rust(text)
    for hit in ARCHITECTURE.finditer(code):
        yield line_of(code, hit.start()), f"`{hit.group(0)}` outside the places listed in scripts/check_tree.py"


def without_tests(code):
    """`code` with every item under `#[cfg(test)]` or `#[cfg(all(test, ..))]` blanked."""
    out = list(code)
    for hit in re.finditer(r"#\[cfg\((?:test|all\((?:test|loom)\b[^\]]*|loom)\)?\)?\]", code):
        i, depth = hit.end(), 0
        while i < len(code):
            if code[i] == "{":
                depth += 1
            elif code[i] == "}":
                depth -= 1
                if depth == 0:
                    break
            elif code[i] == ";" and depth == 0:
                break
            i += 1
        for j in range(hit.start(), min(i + 1, len(code))):
            if out[j] != "\n":
                out[j] = " "
    return "".join(out)


def first_names(tree):
    """The first path segments of `a::b`, or of `{a::b, c::{d}}`."""
    tree = tree.strip()
    if not tree.startswith("{"):
        return [re.match(r"\w+|\*?", tree).group(0)]
    names, depth, start = [], 0, 1
    for i, c in enumerate(tree):
        if c == "{":
            depth += 1
        elif c == "}":
            depth -= 1
        if (c == "," and depth == 1) or (c == "}" and depth == 0):
            piece = tree[start:i].strip()
            if piece:
                names.append(re.match(r"\w+|\*?", piece).group(0))
            start = i + 1
            if depth == 0:
                break
    return names


def pager_pure(path, text):
    ours = path.startswith(PAGER) and path.endswith(".rs") and not path.startswith(PAGER + "tests/")
    if not ours or os.path.basename(path) == "tests.rs":
        return
    code = without_tests(split_rust(text)[0])
    for hit in re.finditer(r"(?<![\w:])(?:std|core)\s*::\s*", code):
        for module in first_names(code[hit.end() : hit.end() + 4000]):
            if module in PAGER_STD_BANNED - PAGER_STD_ALLOWED.get(path, set()):
                yield line_of(code, hit.start()), f"the pager uses std::{module}: it has no I/O, clock or threads"


def gradients(path, text):
    if not (path.startswith(TRAINER) and path.endswith(".rs")):
        return
    code, _ = split_rust(text)
    for hit in NO_BACKWARD.finditer(code):
        yield line_of(code, hit.start()), f"`{hit.group(0)}` has no backward: it cuts gradients off in silence"


def words(path, text):
    if path in BANNED_EXEMPT:
        return
    for number, line in enumerate(text.split("\n"), 1):
        for pattern, advice in BANNED:
            if hit := pattern.search(line):
                yield number, f"{hit.group(0)!r}: {advice}"


def ascii_only(path, text):
    if path.startswith(CHARACTERS_ANYTHING):
        return
    for number, line in enumerate(text.split("\n"), 1):
        for c in line:
            if ord(c) > 126 and c not in CHARACTERS_ALLOWED or c == "\r":
                yield number, f"character U+{ord(c):04X}; sources are ASCII (in Rust, write \\u{{{ord(c):x}}})"
                break


def columns(path, text):
    """No line has more than 120 columns. What cannot be broken well does not count: the inside of string literals, which
    are messages and test data; URLs; tables; and recorded JSON, one object a line, in Markdown."""
    if not path.endswith(COLUMNS_ENDINGS):
        return
    lines = text.split("\n")
    if all(len(line) <= COLUMNS_MOST for line in lines):
        return
    code, notes = (part.split("\n") for part in split_rust(text)) if path.endswith(".rs") else (lines, lines)
    for number, (line, ours, note) in enumerate(zip(lines, code, notes), 1):
        without_urls = re.sub(r"\S*://\S*", "", line)
        if len(without_urls) <= COLUMNS_MOST or re.match(r"\s*(?://[/!] ?)?\|", line):
            continue
        if path.endswith(".rs"):
            literal = sum(c != " " and a == b == " " for c, a, b in zip(line, ours, note))
        elif path.endswith(".md"):
            literal = len(line) if line.startswith('{"') else 0
        else:
            quoted = "" if line.lstrip().startswith("#") else line
            literal = sum(len(hit) for hit in re.findall(r"""\"(?:\\.|[^"\\])*\"|'(?:\\.|[^'\\])*'""", quoted))
        if len(line) - literal > COLUMNS_MOST:
            yield number, f"{len(line)} columns; a line has at most {COLUMNS_MOST}"


def slug(heading):
    heading = re.sub(r"[`*]", "", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


def without_code(text):
    """Markdown with fenced and inline code blanked."""
    out, fenced = [], False
    for line in text.split("\n"):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            out.append("")
        else:
            out.append("" if fenced else re.sub(r"`[^`]*`", "", line))
    return out


def links(path, text, root):
    if not path.endswith(".md"):
        return
    for number, line in enumerate(without_code(text), 1):
        for hit in re.finditer(r"\]\(([^)\s]+)\)", line):
            target = hit.group(1)
            if re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue
            file, _, anchor = target.partition("#")
            full = os.path.join(root, os.path.dirname(path), file) if file else os.path.join(root, path)
            full = os.path.normpath(full)
            if not os.path.exists(full):
                yield number, f"link to {target}: there is no such file"
            elif os.path.relpath(full, root).startswith(".."):
                yield number, f"link to {target} leaves the repository"
            elif anchor and full.endswith(".md"):
                with open(full, encoding="utf-8") as other:
                    headings = {slug(m.group(1)) for m in re.finditer(r"^#+\s+(.*)$", other.read(), re.M)}
                if anchor not in headings:
                    yield number, f"link to {target}: no such heading"


# ---- import circles ----

def roots_of(files):
    """The roots of the tree's crates, which are not those of tests, benches and examples; `files` are the tree's Rust
    sources and manifests by path."""
    for path, text in files.items():
        folder, _, name = path.rpartition("/")
        if name != "Cargo.toml":
            continue
        sections = re.split(r"^\[+([\w.-]+)\]+", text, flags=re.M)
        named = [section for kind, section in zip(sections[1::2], sections[2::2]) if kind in ("lib", "bin")]
        roots = [hit.group(1) for section in named for hit in [re.search(r'^path\s*=\s*"(.*)"', section, re.M)] if hit]
        prefix = f"{folder}/" if folder else ""
        programs = re.compile(re.escape(prefix) + r"src/bin/[^/]+(?:\.rs|/main\.rs)")
        roots = [prefix + root for root in (*roots, "src/lib.rs", "src/main.rs")] + list(filter(programs.fullmatch, files))
        yield from dict.fromkeys(root for root in roots if root in files)


def module_of(crate, path):
    """The module path of a source file, as a tuple."""
    parts = path[len(crate) + 1 : -len(".rs")].split("/")
    return tuple(parts[:-1] if parts[-1] == "mod" else parts)


def paths_of(tree, prefix=()):
    """Every path of a use tree: `a::{b, c::{d as e}}` gives a::b and a::c::d."""
    tree = tree.strip()
    if not tree.startswith("{"):
        head, brace, rest = tree.partition("{")
        names = [n for n in head.split(" as ")[0].replace(" ", "").split("::") if n and n != "*"]
        if not brace:
            yield prefix + tuple(names)
            return
        prefix, tree = prefix + tuple(names), "{" + rest
    depth, start = 0, 1
    for i, c in enumerate(tree):
        depth += (c == "{") - (c == "}")
        if (c == "," and depth == 1) or (c == "}" and depth == 0):
            if tree[start:i].strip():
                yield from paths_of(tree[start:i], prefix)
            start = i + 1
            if depth == 0:
                return


def imports(module, code, modules, exported, own):
    """The modules that a module's code names, outside of its tests. A parent that passes a child's name on does not
    count as its user, and who takes the name from the parent uses the child. `own` is what the root defines."""
    found = set()
    for hit in re.finditer(r"\b(?:use\s+)?((?:crate|super)\s*::[\w:\s]*(?:\{[^;]*?\}(?=\s*;))?)", code):
        for path in paths_of(hit.group(1)):
            base = () if path[0] == "crate" else module[:-1]
            rest = list(path[1:])
            while rest and rest[0] == "super":
                base, rest = base[:-1], rest[1:]
            while rest and base + (rest[0],) in modules:
                base, rest = base + (rest[0],), rest[1:]
            if rest:
                base = exported.get((base, rest[0]), base)
            # What the root only passes on is not its own.
            if base != module and (base or (rest and rest[0] in own)):
                found.add(base)
    return found


def used_by_root(code, modules):
    """The modules that a root uses itself. What it passes on does not count."""
    code = re.sub(r"\bpub(?:\([\w ]+\))?\s+use\b[^;]*;|\bmod\s+\w+\s*;", "", code)
    return {(name,) for name in re.findall(r"(?<![:\w])(?:self\s*::\s*)?(\w+)\s*::", code) if (name,) in modules}


# What a root defines, and others can name.
ITEM = re.compile(r"^(?:pub(?:\([\w ]+\))?\s+)?(?:unsafe\s+|const\s+|async\s+)*(?:struct|enum|trait|fn|type|const|static|union)\s+(\w+)", re.M)


def circles(files):
    """(path, what) of each circle of a crate's modules; `files` are the tree's Rust sources and manifests by path."""
    roots = list(roots_of(files))
    folders = {root.rpartition("/")[0] for root in roots}
    for root in roots:
        crate = root.rpartition("/")[0]
        inner = tuple(f"{other}/" for other in folders if other.startswith(crate + "/"))
        ours = {p: t for p, t in files.items() if p.startswith(crate + "/") and not p.startswith(inner or ("\0",))}
        ours = {p: t for p, t in ours.items() if p.endswith(".rs") and "/tests/" not in p}
        # A program beside a library is another crate.
        ours = {p: t for p, t in ours.items() if p == root or p not in roots and not p.endswith("/build.rs")}
        modules = {() if p == root else module_of(crate, p): p for p in ours}
        codes = {m: without_tests(split_rust(ours[p])[0]) for m, p in modules.items()}
        exported = {}
        for module, code in codes.items():
            for hit in re.finditer(r"\buse\s+([^;]*);", code):
                for path in paths_of(hit.group(1)):
                    base = () if path[:1] == ("crate",) else module
                    rest = list(path[path[:1] in (("crate",), ("self",)) :])
                    while rest and base + (rest[0],) in modules:
                        base, rest = base + (rest[0],), rest[1:]
                    if rest and base != module:
                        exported[(module, path[-1])] = base
        own = set(ITEM.findall(codes[()]))
        edges = {m: imports(m, code, modules, exported, own) & set(modules) for m, code in codes.items()}
        edges[()] |= used_by_root(codes[()], modules)
        # Whatever uses nothing that is left, or is used by nothing that is left, is in no circle.
        left = set(edges)
        while True:
            used = set().union(*(edges[m] & left for m in left)) if left else set()
            free = {m for m in left if not edges[m] & left or m not in used}
            if not free:
                break
            left -= free
        if left:
            first = min(left)
            names = ", ".join("::".join(m) or "the root" for m in sorted(left))
            yield modules[first], f"modules that import each other in a circle are among {names}"


RULES = [
    ("unsafe-place", unsafe_place),
    ("unsafe-reason", unsafe_reason),
    ("architecture", architecture),
    ("pager-pure", pager_pure),
    ("gradients", gradients),
    ("words", words),
    ("ascii", ascii_only),
    ("columns", columns),
]


def check_text(path, text, root):
    for rule, function in RULES:
        for line, what in function(path, text):
            yield f"{path}:{line}: {rule}: {what}"
    for line, what in links(path, text, root):
        yield f"{path}:{line}: links: {what}"


def is_text(path):
    return path.endswith(TEXT_ENDINGS) or path in TEXT_NAMES


def tracked(root):
    """Files git knows or would add; where there is no git, every file outside the ignored folders."""
    listing = subprocess.run(
        ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True, check=False
    )
    if listing.returncode == 0:
        return sorted(p for p in set(listing.stdout.decode().split("\0")) if p and os.path.isfile(os.path.join(root, p)))
    found = []
    for folder, inside, files in os.walk(root):
        inside[:] = [d for d in inside if d not in {".git", ".venv", "target", "models", "artifacts", "__pycache__"}]
        found += [os.path.relpath(os.path.join(folder, f), root) for f in files]
    return sorted(found)


def check(root):
    count = 0
    sources = {}
    for path in tracked(root):
        full = os.path.join(root, path)
        size = os.path.getsize(full)
        most = BLOB_BYTES_OF.get(path, BLOB_BYTES_MAX)
        if size > most:
            yield f"{path}:1: size: {size} bytes; a file may have {most}"
        if not is_text(path):
            continue
        count += 1
        try:
            with open(full, encoding="utf-8", newline="") as file:
                text = file.read()
        except UnicodeDecodeError:
            yield f"{path}:1: ascii: not UTF-8"
            continue
        yield from check_text(path, text, root)
        if path.endswith((".rs", "/Cargo.toml")) or path == "Cargo.toml":
            sources[path] = text
    for path, what in circles(sources):
        yield f"{path}:1: circle: {what}"
    if count == 0:
        yield f"{root}:1: tree: no text files found"


# ---- the checks checked: what must be found, what must not ----

BAD = [
    ("unsafe-place", "runtime/pager/table.rs", "fn f() {\n    // SAFETY: x\n    unsafe { g() }\n}\n"),
    ("unsafe-place", "tests/model.rs", "unsafe fn f() {}\n"),
    ("unsafe-place", "runtime/outcore/devices.rs", "unsafe fn f() {}\n"),
    ("unsafe-reason", "runtime/outcore/device/host.rs", "fn f() {\n    unsafe { g() }\n}\n"),
    ("unsafe-reason", "runtime/outcore/device/host.rs", "// SAFETY: for f only\nfn f() {\n    g();\n    unsafe { g() }\n}\n"),
    ("unsafe-reason", "runtime/outcore/device/host.rs", 'fn f() {\n    g("SAFETY: no");\n    unsafe { g() }\n}\n'),
    ("unsafe-reason", "runtime/outcore/store/mod.rs", "struct P;\nunsafe impl Send for P {}\n"),
    ("architecture", "runtime/outcore/ranges.rs", '#[cfg(target_arch = "x86_64")]\nfn f() {}\n'),
    ("architecture", "runtime/outcore/ranges.rs", "use std::arch::x86_64::*;\n"),
    ("architecture", "examples/llm/src/model.rs", 'fn f() -> bool { is_x86_feature_detected!("avx2") }\n'),
    ("architecture", "runtime/outcore/ranges.rs", 'fn f() { asm!("nop") }\n'),
    ("pager-pure", "runtime/pager/table.rs", "use std::{sync::Arc, time::Instant};\n"),
    ("pager-pure", "runtime/pager/table.rs", "fn f() { std::thread::yield_now(); }\n"),
    ("pager-pure", "runtime/pager/table.rs", "#[cfg(test)]\nmod tests { use std::fs; }\nuse std::fs;\n"),
    ("gradients", "examples/train/src/a.rs", "fn f() { let y = candle_nn::ops::rms_norm(&x, &w, 1e-5)?; }\n"),
    ("gradients", "examples/train/src/a.rs", "use candle_nn::ops;\n"),
    ("gradients", "examples/train/src/a.rs", "use candle_nn::{ops::softmax_last_dim, rotary_emb::rope};\n"),
    ("gradients", "examples/train/src/a.rs", "use candle_nn::{LayerNorm, layer_norm};\n"),
    ("gradients", "examples/train/src/a.rs", "use candle_core::quantized::QMatMul;\n"),
    ("gradients", "examples/train/tests/a.rs", "fn f() { x.apply_op1_no_bwd(&op) }\n"),
    ("words", "docs/a.md", "Look in /home/me/outcore.\n"),
    ("words", "runtime/outcore/lib.rs", "fn f() { todo!() }\n"),
    ("words", "runtime/outcore/lib.rs", "// FIXME later\n"),
    ("words", "README.md", "A blazingly quick runtime.\n"),
    ("words", "docs/a.md", "See http://10.0.0.7/x.\n"),
    ("ascii", "runtime/outcore/lib.rs", "// a \u2014 b\n"),
    ("ascii", "docs/a.md", "a\r\n"),
    ("columns", "runtime/outcore/lib.rs", "// " + "word " * 24 + "\n"),
    ("columns", "runtime/outcore/lib.rs", f'/// "{"quoted " * 18}"\nfn f() {{}}\n'),
    ("columns", "runtime/outcore/lib.rs", "fn f() { g(" + "1, " * 40 + "); }\n"),
    ("columns", "scripts/a.py", '"""' + "word " * 24 + '"""\n# ' + "word " * 24 + "\n"),
    ("columns", "scripts/a.sh", "# " + "word " * 24 + "\n"),
    ("columns", "docs/a.md", "word " * 24 + "words\n"),
    ("links", "docs/a.md", "See [b](b.md).\n"),
    ("links", "docs/a.md", "See [a](a.md#nowhere).\n\n# Somewhere\n"),
]
GOOD = [
    ("runtime/outcore/device/host.rs", "fn f() {\n    // SAFETY: g is pure; kept by h.\n    let x = h(\n        unsafe { g() },\n    );\n}\n"),
    ("runtime/outcore/device/host.rs", "// SAFETY: only an address.\nunsafe impl Send for P {}\n"),
    ("runtime/outcore/device/host.rs", "fn f() -> u8 {\n    unsafe {\n        // SAFETY: inside, on the next line.\n        g()\n    }\n}\n"),
    ("runtime/outcore/pin/host.rs", "// SAFETY: pinned.\nlet s = unsafe { slice(p, n) };\n"),
    ("runtime/outcore/lib.rs", "// unsafe { in a comment }\nconst S: &str = \"unsafe { x }\";\nconst R: &str = r#\"unsafe \" { y }\"#;\n"),
    ("runtime/outcore/lib.rs", "fn f<'a>(x: &'a str) -> char { 'u' }\n/* /* unsafe */ { */\n"),
    ("examples/llm/src/kernels.rs", '#[cfg(target_arch = "x86_64")]\nuse std::arch::x86_64::*;\n'),
    ("runtime/outcore/lib.rs", "// target_arch in a comment\nconst S: &str = \"asm!\";\n"),
    ("runtime/pager/table.rs", "//! [`Store`](crate::store::Store)\nuse std::{collections::BTreeMap, fmt};\nuse slab::Slab;\n"),
    ("runtime/pager/table.rs", "use super::state::Word;\n#[cfg(test)]\nmod tests {\n    use std::time::Instant;\n    use proptest::prelude::*;\n}\n"),
    ("runtime/pager/table.rs", "#[cfg(all(test, loom))]\nmod loom_word { use loom::thread; use crate::store::Store; }\n"),
    ("examples/train/src/a.rs", "// candle_nn::ops::rms_norm\nfn norm(rope_base: f64) -> &str { \"softmax_last_dim\" }\n"),
    ("examples/llm/src/a.rs", "fn rms_norm() { rope() }\n"),
    ("docs/a.md", "# Some `thing` here\n\n[up](#some-thing-here) [web](https://example.org/x) `[no](none.md)`\n"),
    ("runtime/outcore/lib.rs", f'const S: &str = "{"long_word " * 20}";\n//! | {"a cell " * 20} |\n'),
    ("scripts/a.py", f'S = "{"a long text " * 12}"\n'),
    ("docs/a.md", f'| {"a cell " * 20} |\n\n[a]: https://example.org/{"a" * 120}\n\n{{"bench": "{"x" * 120}"}}\n'),
    ("docs/a.md", "Bytes \u00d7 \u00b5s, 2\u00b2; http://127.0.0.1:8080/x; target/tmp/x\n"),
]


def self_test():
    failures = []
    for rule, path, text in BAD + [(None, *good) for good in GOOD]:
        with tempfile.TemporaryDirectory() as root:
            full = os.path.join(root, path)
            os.makedirs(os.path.dirname(full), exist_ok=True)
            with open(full, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            found = list(check(root))
        if rule is None and found:
            failures.append(f"good text refused: {path}: {text!r}: {found}")
        if rule is not None and not any(f": {rule}: " in line for line in found):
            failures.append(f"bad text passed: {rule}: {path}: {text!r}: found {found}")
    with tempfile.TemporaryDirectory() as root:
        if not list(check(root)):
            failures.append("an empty tree passed")
    line = {
        "c/Cargo.toml": '[package]\nname = "c"\n[lib]\npath = "lib.rs"\n',
        "c/lib.rs": "mod a;\nmod b;\nmod d;\npub use a::A;",
        "c/a.rs": "use crate::b::B;",
        "c/b/mod.rs": "mod c;\npub use c::C;",
        "c/b/c.rs": "use crate::d;",
        "c/d.rs": "fn f() {}\n#[cfg(test)]\nmod tests { use crate::a::A; }",
    }
    if list(circles(line)):
        failures.append(f"modules in a line were taken for a circle: {list(circles(line))}")
    of_root = line["c/lib.rs"] + "\npub struct Root;\n"
    uses_a = {"c/a.rs": "use crate::b::C;", "c/d.rs": "use crate::Root;"}
    for name, circle in [
        ("b::c, d", {"c/d.rs": "use crate::b::C;"}),
        ("b::c, d by a nested name", {"c/b/mod.rs": "mod c;\nmod e;\npub use e::{self, C};", "c/b/e.rs": "pub use super::c::C;",
                                      "c/a.rs": "", "c/b/c.rs": "use crate::d;", "c/d.rs": "use crate::b::c::C;"}),
        ("in a program", {"c/Cargo.toml": '[package]\nname = "c"\n', "c/src/bin/x/main.rs": "mod a;\nmod b;",
                          "c/src/bin/x/a.rs": "use crate::b;", "c/src/bin/x/b.rs": "use crate::a;"}),
        ("in a library beside a program", {"c/Cargo.toml": '[[bin]]\npath = "src/p.rs"\n', "c/src/lib.rs": "mod a;\nmod b;",
                                           "c/src/p.rs": "", "c/src/a.rs": "use crate::b;", "c/src/b.rs": "use crate::a;"}),
        ("the root, d", {"c/lib.rs": of_root + "fn f() { d::f() }", "c/d.rs": "use crate::Root;"}),
        ("the root, a, b::c, d", {**uses_a, "c/lib.rs": of_root + "use a::A;"}),
    ]:
        if not list(circles({**line, **circle})):
            failures.append(f"a circle passed: {name}")
    if list(circles({**line, "c/lib.rs": of_root, "c/d.rs": "use crate::Root;"})):
        failures.append("a root that uses nothing was taken for a part of a circle")
    for failure in failures:
        print(failure)
    print(f"check_tree self-test: {len(BAD) + len(GOOD) + 9 - len(failures)} passed, {len(failures)} failed")
    return 1 if failures else 0


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    if arguments:
        sys.exit(__doc__)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    findings = list(check(root))
    for finding in findings:
        print(finding)
    print(f"check_tree: {len(findings)} finding(s)")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
