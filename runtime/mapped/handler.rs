//! Who answers for the pages of a range: what the thread of faults asks for, and what it tells.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use outcore::{Error, PinSet, Result, Write};

use crate::telling::Tell;

/// What keeps pages where they are.
#[derive(Debug)]
#[expect(dead_code, reason = "held, and never looked at")]
pub enum Pins {
    Read(PinSet),
    /// Nobody else has pins of these pages, and they are dirty.
    Write(PinSet<Write>),
}

/// Pages of a range that are used together.
pub struct Request {
    /// Where they begin in the range, ascending. Each is published as soon as it is filled.
    pub pages: Vec<u64>,
    /// Whether they are to be written.
    pub writes: bool,
    /// The pin of all of them.
    pub pins: Pin<Box<dyn Future<Output = Result<Pins>> + Send>>,
}

/// Who answers for the pages of a range.
pub trait Handler: Send + Sync + fmt::Debug {
    /// What is to be asked for because the byte `offset` of the range was touched: first the page that holds it, alone.
    /// Nothing if the range has no such page.
    fn requests(&self, offset: u64) -> Vec<Request>;
    /// The same for a write, in a range that is private: one page.
    fn request_to_write(&self, offset: u64) -> Option<Request>;
    /// Whether the range is private, so that it may be written.
    fn is_private(&self) -> bool;
    /// This page is about to be written.
    fn will_be_written(&self, offset: u64);
    /// Whether this page is hidden again when it is let go, so that its next use is seen.
    fn hides(&self, page: u64) -> bool;
    /// How many pins the page has. Takes no lock.
    fn pins(&self, page: u64) -> u32;
    /// A hidden page was shown to a thread that touched it, which took this long.
    fn shown(&self, page: u64, took: Duration);
    /// How many pages may be kept pinned behind their use, whatever range they are of.
    fn may_keep(&self) -> usize;
    /// How many threads may be served at once.
    fn turns(&self) -> usize;
    /// The fill of the page failed: the thread that touched it gets SIGBUS. Without an offset, no page can be filled.
    /// Returns what tells the program; it is called on another thread.
    fn failed(&self, offset: Option<u64>, error: Error) -> Tell;
}
