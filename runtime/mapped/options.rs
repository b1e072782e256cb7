//! How a file is mapped.

use std::fs::Metadata;
use std::path::PathBuf;

use outcore::Walker;

use crate::remembered::{Identity, Place, TurnsPlace};
use crate::row::Row;

/// How a file is [mapped](crate::Mapped::open), where that is not to be as usual.
///
/// ```no_run
/// # use outcore_mapped::{MapOptions, builder_for};
/// let runtime = builder_for("model.gguf")?.open()?;
/// // Nothing is written to the user's cache folder.
/// let file = MapOptions::new().keep_order(false).open(&runtime, "model.gguf")?;
/// # Ok::<(), outcore::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MapOptions {
    keep_order: bool,
    folder: Option<PathBuf>,
    pub(crate) file: Option<Metadata>,
    pub(crate) walker: Option<Walker>,
}

impl Default for MapOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl MapOptions {
    /// As [`Mapped::open`](crate::Mapped::open) does it.
    pub fn new() -> Self {
        Self { keep_order: true, folder: None, file: None, walker: None }
    }

    /// Whether the order in which the program uses the file is kept for the next start once it was learned, and an
    /// order that was kept is followed from the start. So it is, unless told.
    ///
    /// Files that are parts of one model have one order. It is kept for the files as they are now: after a change of
    /// one, it is learned anew. If the program does not follow it, it is dropped as soon as that is seen. A note takes
    /// at most 1 MiB; the folder has at most 64 of them, each for at most 90 days.
    #[must_use]
    pub fn keep_order(mut self, keep: bool) -> Self {
        self.keep_order = keep;
        self
    }

    /// The folder for orders that are kept. Unless told, it is `outcore` in `$XDG_CACHE_HOME`, or in `~/.cache`.
    #[must_use]
    pub fn orders_in(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Some(folder.into());
        self
    }

    /// The file that the path is to lead to, as it was when it was opened. If the path leads to another one by then, or
    /// the file has changed, nothing is mapped: that is an error of kind [`NotFound`](outcore::ErrorKind::NotFound).
    #[must_use]
    pub fn only(mut self, file: Metadata) -> Self {
        self.file = Some(file);
        self
    }

    /// The program announces what it uses: it pins [the file's bytes](crate::Mapped::tensor) before, by this walker,
    /// and declares its order on it.
    ///
    /// Nothing else is known of the order then: what headers tell does not count, none is looked for in touches or
    /// kept, no page is hidden behind its use, and nothing is read because a mixture's expert was touched. A touch of a
    /// page that is not there is served as ever, is a use of this walker, and [counts](crate::Mapped::touches).
    #[must_use]
    pub fn announced(mut self, walker: &Walker) -> Self {
        self.walker = Some(walker.clone());
        self
    }

    pub(crate) fn is_announced(&self) -> bool {
        self.walker.is_some()
    }

    fn keeps(&self) -> bool {
        self.keep_order && !self.is_announced()
    }

    /// Whether these keep orders as others do, by the same walker if one is named: then they may share one.
    pub(crate) fn keeps_as(&self, other: &Self) -> bool {
        let walker = |options: &Self| options.walker.as_ref().map(Walker::id);
        (self.keeps(), &self.folder, walker(self)) == (other.keeps(), &other.folder, walker(other))
    }

    pub(crate) fn place(&self, files: &[Identity], row: &Row, page: u64) -> Option<Place> {
        if !self.keeps() {
            return None;
        }
        Place::of(files, page, row.len(), self.folder.clone())
    }

    /// Where it is kept which models were used in turn, the first of which begins with this file.
    pub(crate) fn turns_place(&self, file: &Identity, page: u64) -> Option<TurnsPlace> {
        if !self.keeps() {
            return None;
        }
        TurnsPlace::of(file, page, self.folder.clone())
    }
}
