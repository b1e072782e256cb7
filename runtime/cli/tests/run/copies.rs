//! An engine that copies its weights is named before the kernel ends it; others are not.

use std::io::Read;
use std::process::Stdio;

use super::*;

/// Maps a file, and copies it into memory of its own: all ("copies"), or all but its beginning ("late"); or does not.
/// Other memory grows at once while nothing is read, or with a part of the file ("beside"). `dlopen` has the program
/// look like an engine.
const ENGINE: &str = r#"
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    struct stat found;
    const char *what = argv[2];
    int fd = open(argv[1], O_RDONLY), writes = !strcmp(what, "writes");
    if (fd < 0 || fstat(fd, &found) != 0) return 2;
    if (*argv[3] && !dlopen(argv[3], RTLD_NOW)) return 3;
    int copies = !strcmp(what, "copies"), late = !strcmp(what, "late"), beside = !strcmp(what, "beside");
    size_t step = 1 << 20, steps = found.st_size / step, mib = argc > 4 ? strtoul(argv[4], NULL, 10) : 0;
    size_t begin = 120, parts = 70, part_of_own = (mib << 20) / parts;
    char *weights = mmap(NULL, found.st_size, PROT_READ | (writes ? PROT_WRITE : 0), MAP_PRIVATE, fd, 0);
    unsigned long sum = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (size_t at = 0; at < steps; at++) {
            char *part = weights + at * step, *copy = malloc(step);
            if (!copy) return 4;
            memcpy(copy, part, step);
            for (size_t byte = 0; byte < step; byte += 4096) sum += copy[byte];
            if (writes) part[7] = 1;
            if (!copies && !(late && at >= 30)) free(copy);
            // Keys and values: no copies, however many bytes. What grows with all that is read would look like one.
            if (pass == 0 && at == 8 && !beside) memset(malloc(mib << 20), 1, mib << 20);
            if (pass == 0 && beside && at >= begin && at < begin + parts) memset(malloc(part_of_own), 1, part_of_own);
        }
        if (copies || late) break;
    }
    if (!strcmp(what, "waits")) while (getchar() != EOF);
    printf("%lu\n", sum & 1);
    return 0;
}
"#;

/// A program of this text; `None` without a C compiler, which is said.
fn compiled(folder: &Path, text: &str) -> Option<PathBuf> {
    let (source, program) = (folder.join("engine.c"), folder.join("engine"));
    std::fs::write(&source, text).unwrap();
    let Ok(built) = Command::new("cc").args(["-O1", "-o"]).arg(&program).arg(&source).arg("-ldl").output() else {
        eprintln!("SKIPPED: there is no C compiler (cc)");
        return None;
    };
    assert!(built.status.success(), "{built:?}");
    Some(program)
}

/// A file that begins as a model does, and is as long, with a hole: reading it is as fast as can be.
fn hollow(folder: &Path, name: &str, mib: u64) -> PathBuf {
    let path = folder.join(name);
    let mut file = File::create(&path).unwrap();
    file.write_all(b"GGUF").unwrap();
    file.set_len(mib << 20).unwrap();
    path
}

const NAMED: &str = "the program copies weights into memory of its own";

#[test]
fn an_engine_that_copies_weights_is_named_before_it_is_killed() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(engine) = compiled(folder.path(), ENGINE) else { return };
    let libraries = ["", "ggml-of-test", "torch_of_test"].map(|name| {
        let path = folder.path().join(format!("lib{name}.so"));
        let built = Command::new("cc").args(["-shared", "-x", "c", "-o"]).arg(&path).arg("/dev/null").status().unwrap();
        assert!(built.success());
        if name.is_empty() { String::new() } else { path.to_str().unwrap().to_owned() }
    });
    let remedies = ["`generate`", "give it `--no-repack`", "save_original_format=False"];
    let path = hollow(folder.path(), "model.gguf", 400);
    let path = path.to_str().unwrap();
    for turn in 0..10 {
        let (library, remedy) = (&libraries[turn % 3], remedies[turn % 3]);
        let what = if turn % 4 == 3 { "late" } else { "copies" };
        // Pages give way as the program grows, or keep what they were given.
        let options: &[&str] = if turn < 5 { &[] } else { &["--budget", "40MiB"] };
        let Some((output, told)) = in_group("200MiB", options, &engine, [path, what, library]) else { return };
        assert!(!output.status.success() && told.contains("oom_kills=1"), "{turn}: {told}");
        let lines: Vec<&str> = told.lines().filter(|line| line.starts_with("outcore: ")).collect();
        assert_eq!(lines.len(), 1, "{turn}: {told}");
        assert!(lines[0].contains(NAMED) && lines[0].contains("its control group leaves it"), "{turn}: {told}");
        let given: Vec<&str> = remedies.into_iter().filter(|remedy| lines[0].contains(remedy)).collect();
        assert_eq!(given, [remedy], "{turn}: {told}");
    }
}

#[test]
fn an_engine_that_copies_more_than_it_was_given_is_named_too() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(engine) = compiled(folder.path(), ENGINE) else { return };
    let path = hollow(folder.path(), "model.gguf", 300);
    for (memory, named) in [("150MiB", true), ("100GiB", false)] {
        let output = outcore()
            .args(["run", "--memory", memory, "--"])
            .arg(&engine)
            .arg(&path)
            .args(["copies", ""])
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{memory}: {told}");
        assert_eq!(told.matches(NAMED).count(), usize::from(named), "{memory}: {told}");
        assert_eq!(told.contains("--memory is 150.0 MiB"), named, "{memory}: {told}");
        // One line is enough.
        assert!(!told.contains("is too small"), "{told}");
    }
}

/// Keys and values, also if they grow while a part of the file is read, weights that are written privately, and what is
/// copied for a moment only are no copies of weights.
#[test]
fn programs_that_copy_no_weights_are_not_named() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(engine) = compiled(folder.path(), ENGINE) else { return };
    let path = hollow(folder.path(), "model.gguf", 400);
    let path = path.to_str().unwrap();
    let own = &[path, "reads", "", "150"];
    for (options, what, mechanism) in [
        (["--budget", "40MiB"].as_slice(), "reads", "move"),
        (&[], "reads", "move"),
        (&[], "reads", "copy"),
        (&["--memory", "200MiB"], "reads", "move"),
        (&["--budget", "40MiB"], "writes", "copy"),
        (&[], "writes", "copy"),
        (&["--budget", "40MiB"], "beside", "move"),
        (&["--budget", "40MiB"], "beside", "copy"),
        (&[], "beside", "move"),
        (&["--memory", "200MiB"], "beside", "move"),
    ] {
        let program = Path::new("/usr/bin/env");
        let setting = format!("OUTCORE_RUN_MECHANISM={mechanism}");
        let arguments = [&[&*setting, engine.to_str().unwrap(), own[0], what], &own[2..]].concat();
        let Some((output, told)) = in_group("240MiB", options, program, &arguments) else { return };
        let case = format!("{options:?} {what} {mechanism}");
        assert!(output.status.success() && told.contains("oom_kills=0"), "{case}: {told}");
        assert!(told.contains("1 file(s) mapped") && told.contains("its own memory grew by 1"), "{case}: {told}");
        assert!(!told.contains("copie") && !told.contains("too small"), "{case}: {told}");
    }
}

#[test]
fn a_memory_that_the_program_itself_takes_is_said_at_once() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(engine) = compiled(folder.path(), ENGINE) else { return };
    let path = hollow(folder.path(), "model.gguf", 64);
    // Ended where nothing is said.
    let mut command = outcore_within(120);
    command.args(["run", "--memory", "60MiB", "--"]).arg(&engine).arg(&path).args(["waits", "", "100"]);
    let mut program = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut errors = BufReader::new(program.stderr.take().unwrap());
    let mut line = String::new();
    // The program ends when its input does, so the line comes while it runs.
    errors.read_line(&mut line).unwrap();
    assert!(line.contains("--memory 60.0 MiB is too small: the program itself takes "), "{line}");
    assert!(line.contains("; give it more than "), "{line}");
    drop(program.stdin.take());
    let mut rest = String::new();
    errors.read_to_string(&mut rest).unwrap();
    assert!(program.wait().unwrap().success(), "{rest}");
    assert!(!rest.contains("is too small") && rest.contains("raise --memory"), "{rest}");
}
