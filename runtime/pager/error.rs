//! The one public error. It has a kind to match on, a sentence that names the thing and the limit, a remedy, and a
//! cause.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;

/// The result of every fallible call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, for programs to match on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument is outside what the call accepts.
    InvalidArgument,
    /// A file, a tensor or another named thing does not exist.
    NotFound,
    /// The operating system refused access.
    PermissionDenied,
    /// A model file's header is malformed, truncated or wrong.
    Format,
    /// The input is well-formed, but this build does not handle it.
    Unsupported,
    /// A budget cannot hold what was asked for as one unit.
    BudgetTooSmall,
    /// A scope that holds guards asks for what others hold, or for what its own guards exclude. It keeps what it holds.
    /// Drop all its guards and try again, pin what is needed as one set, or reserve it. Or: a tensor that is to be
    /// committed or rolled back is pinned.
    Busy,
    /// The operating system or the device would not give memory or address space.
    OutOfMemory,
    /// The process would need more memory mappings than the kernel allows it.
    TooManyMappings,
    /// Reading or writing failed.
    Io,
    /// Reading or writing took longer than the time limit set for the runtime.
    TimedOut,
    /// A GPU or its driver failed.
    Device,
    /// The file system that holds the scratch file is full.
    DiskFull,
    /// Bytes read back differ from the bytes that were written or first read.
    Corrupt,
    /// A model file changed while it was open.
    ModelChanged,
    /// The page's only valid bytes were lost to an earlier failure.
    Poisoned,
    /// The runtime is closing or closed.
    Closed,
    /// A broken internal invariant: a bug in outcore.
    Internal,
}

/// Runs a caller's closure. A panic in it becomes its message, and affects nobody else.
#[doc(hidden)]
pub fn caught<T>(call: impl FnOnce() -> T) -> std::result::Result<T, String> {
    panic::catch_unwind(AssertUnwindSafe(call)).map_err(|payload| match payload.downcast::<String>() {
        Ok(text) => *text,
        Err(payload) => payload.downcast::<&'static str>().map(|text| (*text).to_owned()).unwrap_or_else(|unknown| {
            // Its `drop` is the caller's code too, and could panic.
            std::mem::forget(unknown);
            "no message".to_owned()
        }),
    })
}

/// Why a call failed. Cheap to clone: one failed fill wakes every waiter with the same error.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    message: String,
    remedy: Option<String>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error of `kind`. `message` names the thing and the limit.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Arc::new(Inner { kind, message: message.into(), remedy: None, source: None }))
    }

    /// An operating-system failure while doing `what` ("read page 7 of model.gguf"). The kind follows from `cause`.
    pub fn io(what: impl Into<String>, cause: io::Error) -> Self {
        let kind = match cause.kind() {
            io::ErrorKind::NotFound => ErrorKind::NotFound,
            io::ErrorKind::PermissionDenied => ErrorKind::PermissionDenied,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::DiskFull,
            io::ErrorKind::OutOfMemory => ErrorKind::OutOfMemory,
            _ => ErrorKind::Io,
        };
        Self::new(kind, what).caused_by(cause)
    }

    fn edit(self, change: impl FnOnce(&mut Inner)) -> Self {
        let mut inner = Arc::unwrap_or_clone(self.0);
        change(&mut inner);
        Self(Arc::new(inner))
    }

    /// Adds what the user can do about it.
    #[must_use]
    pub fn remedy(self, text: impl Into<String>) -> Self {
        self.edit(|e| e.remedy = Some(text.into()))
    }

    /// Adds the failure that led to this one.
    #[must_use]
    pub fn caused_by(self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.edit(|e| e.source = Some(Arc::new(source)))
    }

    /// Puts what was being done before the message: `"{what}: {message}"`.
    #[must_use]
    pub fn context(self, what: impl fmt::Display) -> Self {
        self.edit(|e| e.message = format!("{what}: {}", e.message))
    }

    /// What went wrong, to match on.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether the same call, unchanged, may succeed later: a disk or a network file system may recover, or room may be
    /// freed. The runtime has already repeated what is worth repeating at once; a caller who has time may try again.
    /// Every other error stays until the program, the file or the budget changes.
    ///
    /// ```
    /// # extern crate outcore_pager as outcore;
    /// use outcore::{Error, ErrorKind};
    ///
    /// let full = std::io::Error::from_raw_os_error(28); // ENOSPC
    /// assert!(Error::io("reserve 64 MiB in the scratch file", full).is_transient());
    /// assert!(!Error::new(ErrorKind::Poisoned, "page 7 is lost").is_transient());
    /// ```
    pub fn is_transient(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Io | ErrorKind::TimedOut | ErrorKind::DiskFull | ErrorKind::Busy)
    }

    /// What the user can do about it.
    pub fn advice(&self) -> Option<&str> {
        self.0.remedy.as_deref()
    }
}

/// Writes one line: message, cause, remedy.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        if let Some(source) = &self.0.source {
            write!(f, ": {source}")?;
        }
        if let Some(remedy) = &self.0.remedy {
            write!(f, " ({remedy})")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

/// For what a program does with files of its own: the error says what the system says, and no more. What was an error
/// of this kind before is the same again.
impl From<io::Error> for Error {
    fn from(cause: io::Error) -> Self {
        cause.downcast().unwrap_or_else(|cause| Self::io("a call of the system failed", cause))
    }
}

/// The whole error is the cause of the new one, whose kind is the nearest.
impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match error.kind() {
            ErrorKind::NotFound => io::ErrorKind::NotFound,
            ErrorKind::PermissionDenied => io::ErrorKind::PermissionDenied,
            ErrorKind::InvalidArgument => io::ErrorKind::InvalidInput,
            ErrorKind::Format | ErrorKind::Corrupt => io::ErrorKind::InvalidData,
            ErrorKind::Unsupported => io::ErrorKind::Unsupported,
            ErrorKind::TimedOut => io::ErrorKind::TimedOut,
            ErrorKind::OutOfMemory | ErrorKind::BudgetTooSmall => io::ErrorKind::OutOfMemory,
            ErrorKind::DiskFull => io::ErrorKind::StorageFull,
            _ => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|s| s as &(dyn StdError + 'static))
    }
}
/// The name in `names` that takes the fewest edits to become `name`, or `None` if `names` is empty. Only the first 128
/// characters count, because names in files may be of any length.
#[doc(hidden)]
pub fn closest<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    nearest(name, names).into_iter().next()
}

/// The names in the order of [`closest`].
#[doc(hidden)]
pub fn nearest<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    const COMPARED: usize = 128;
    let start = |text: &str| text.chars().take(COMPARED).collect::<Vec<_>>();
    let wanted = start(name);
    let mut names: Vec<&str> = names.into_iter().collect();
    names.sort_by_cached_key(|other| strsim::generic_damerau_levenshtein(&wanted, &start(other)));
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_system_and_errors_become_each_other() {
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        let error = Error::from(missing());
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains(&missing().to_string()), "{error}");
        let back = io::Error::from(Error::new(ErrorKind::BudgetTooSmall, "two pages").remedy("give more"));
        assert_eq!(back.kind(), io::ErrorKind::OutOfMemory);
        assert!(back.to_string().contains("two pages") && back.to_string().contains("give more"), "{back}");
        let inner = back.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
        assert!(inner.is_some_and(|inner| inner.kind() == ErrorKind::BudgetTooSmall));
        let again = Error::from(back);
        assert_eq!((again.kind(), again.advice()), (ErrorKind::BudgetTooSmall, Some("give more")));
    }
}
