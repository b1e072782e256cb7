//! The operating system: what it allows this process, signals, descriptors and children by `fork`, and small files in
//! the user's folders. The crates beside outcore use it too, so that all do the same. It changes without notice.

pub(crate) mod cache;
pub mod descriptors;
pub mod folder;
pub mod kernel_pages;
pub mod limits;
pub mod machine;
pub mod notes;
pub(crate) mod process;
pub mod signals;
pub mod soon;
