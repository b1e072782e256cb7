//! Whether a program takes the library that `LD_PRELOAD` names.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use elf::ElfStream;
use elf::abi::PT_INTERP;
use elf::endian::AnyEndian;
use elf::file::Class;
use rustix::fs::fgetxattr;
use rustix::process::getuid;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loads {
    /// It does, or that cannot be told.
    Yes,
    /// It has no dynamic linker.
    Static,
    /// The dynamic linker does not take it, because the program has more rights than this user.
    MoreRights,
    /// The same, by capabilities of its file.
    Capabilities,
    /// The program would not start with it: it is for another processor, or has another C library.
    Fails,
}

/// Interpreters of interpreters, as the kernel allows them.
const SCRIPTS_MAX: u32 = 4;
/// The most that is read of a script's first line: what the kernel looks at.
const LINE_MAX: u64 = 256;

impl Loads {
    /// Of a program as it is named on a command line.
    pub fn of(program: &OsStr) -> Self {
        found(program).map_or(Self::Yes, |path| Self::of_file(&path, SCRIPTS_MAX).unwrap_or(Self::Yes))
    }

    pub fn why_not(self) -> Option<&'static str> {
        match self {
            Self::Yes => None,
            Self::Static => Some("is statically linked"),
            Self::MoreRights => Some("runs with the rights of its owner or group"),
            Self::Capabilities => Some("has file capabilities (`getcap` shows them)"),
            Self::Fails => Some("has another C library, or is for another processor"),
        }
    }

    fn of_file(path: &Path, scripts: u32) -> Option<Self> {
        let mut file = File::open(path).ok()?;
        let mut line = Vec::new();
        (&mut file).take(LINE_MAX).read_to_end(&mut line).ok()?;
        if let Some(line) = line.strip_prefix(b"#!") {
            let next = interpreter(line.split(|byte| *byte == b'\n').next()?)?;
            return Self::of_file(&next, scripts.checked_sub(1)?);
        }
        let (of_file, own) = (file.metadata().ok()?, std::fs::metadata("/proc/self").ok()?);
        let other_user = of_file.mode() & 0o4000 != 0 && of_file.uid() != own.uid();
        let other_group = of_file.mode() & 0o2010 == 0o2010 && of_file.gid() != own.gid();
        if other_user || other_group {
            return Some(Self::MoreRights);
        }
        // Root has them anyway.
        if getuid().as_raw() != 0 && gives_capabilities(&file) {
            return Some(Self::Capabilities);
        }
        let own = machine(&File::open("/proc/self/exe").ok()?)?;
        if machine(&file)? != own {
            return Some(Self::Fails);
        }
        let elf = ElfStream::<AnyEndian, _>::open_stream(file.try_clone().ok()?).ok()?;
        let Some(linker) = elf.segments().iter().find(|segment| segment.p_type == PT_INTERP) else {
            return Some(Self::Static);
        };
        let mut name = vec![0; usize::try_from(linker.p_filesz.min(LINE_MAX)).ok()?];
        file.read_exact_at(&mut name, linker.p_offset).ok()?;
        let musl = String::from_utf8_lossy(&name).contains("ld-musl");
        Some(if musl { Self::Fails } else { Self::Yes })
    }
}

/// Whether the kernel gives whoever starts this file more capabilities than it has: those that its file permits, or
/// makes effective. Mounts without set-user-id programs, and processes that may get no new rights, are not asked for:
/// then nothing is lost by a word too many.
fn gives_capabilities(file: &File) -> bool {
    // A magic number with flags, then what is permitted and what may be inherited, each in halves of 32 bits.
    let mut value = [0; 32];
    let Ok(len) = fgetxattr(file, "security.capability", &mut value) else { return false };
    let words = value[..len.min(value.len())].chunks_exact(4).map(|word| word.try_into().map_or(0, u32::from_le_bytes));
    let words = Vec::from_iter(words);
    let is_effective = words.first().is_some_and(|magic| magic & 1 != 0);
    is_effective || [1, 3].into_iter().any(|permitted| words.get(permitted).is_some_and(|bits| *bits != 0))
}

/// Where the shell would find it.
fn found(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(program));
    }
    let path = std::env::var_os("PATH")?;
    let runs = |path: &PathBuf| path.metadata().is_ok_and(|found| found.is_file() && found.mode() & 0o111 != 0);
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(runs)
}

/// The program that runs a script, by the rest of its first line. Of `env`, the one that this runs.
fn interpreter(line: &[u8]) -> Option<PathBuf> {
    let words = line.split(|byte| byte.is_ascii_whitespace()).filter(|word| !word.is_empty());
    let mut words = words.map(OsStr::from_bytes);
    let first = Path::new(words.next()?);
    if first.file_name() != Some(OsStr::new("env")) {
        return Some(first.to_owned());
    }
    let of_env = |word: &&OsStr| word.as_bytes().starts_with(b"-") || word.as_bytes().contains(&b'=');
    found(words.find(|word| !of_env(word))?)
}

/// Word size, order of bytes and processor of an ELF file.
fn machine(file: &File) -> Option<(Class, AnyEndian, u16)> {
    let elf = ElfStream::<AnyEndian, _>::open_stream(file.try_clone().ok()?).ok()?;
    Some((elf.ehdr.class, elf.ehdr.endianness, elf.ehdr.e_machine))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;

    #[test]
    fn interpreters_of_scripts() {
        let of = |line: &str| interpreter(line.as_bytes()).map(|path| path.display().to_string());
        assert_eq!(of(" /usr/bin/python3 -u").as_deref(), Some("/usr/bin/python3"));
        assert_eq!(of(""), None);
        let shell = found(OsStr::new("sh")).unwrap();
        for line in ["/usr/bin/env sh", "/usr/bin/env -S sh -e", "/bin/env -i A=1 sh"] {
            assert_eq!(interpreter(line.as_bytes()).as_ref(), Some(&shell), "{line}");
        }
    }

    #[test]
    fn what_cannot_be_told_is_tried() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let own = std::fs::read("/proc/self/exe").unwrap();
        let itself = file("itself", format!("#!{}\n", folder.path().join("itself").display()).as_bytes());
        for path in [file("empty", b""), file("no", b"neither"), file("cut", &own[..60]), itself] {
            assert_eq!(Loads::of(path.as_os_str()), Loads::Yes, "{}", path.display());
        }
        assert_eq!(Loads::of(OsStr::new("no-such-program")), Loads::Yes);
        assert_eq!(Loads::of(OsStr::new("/proc/self/exe")), Loads::Yes);
        // The byte of the processor.
        let mut other = own;
        other[18] ^= 0x55;
        assert_eq!(Loads::of(file("other", &other).as_os_str()), Loads::Fails);
    }
}
