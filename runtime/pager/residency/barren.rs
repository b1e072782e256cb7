//! What is known of victims while none can go.

use std::collections::VecDeque;

use crate::ids::PageId;

/// What is known of victims since a search offered every resident page and none could go.
///
/// # Invariant
///
/// After such a search, a resident page that is not listed here cannot go. Only an event that lists the page changes
/// that. Either the page is pinned and `wanted`, so the end of the pin is [told](crate::Pager::released); or a move
/// uses the page or its host copy, and ends. A page that becomes resident is listed, because its pins carry no mark.
#[derive(Debug, Default)]
pub(super) struct Barren {
    /// The only resident pages that may be able to go: since the search something has happened to each, so that it may
    /// go, or its pins may carry no mark. In the order in which they were listed. `None` if there was no such search.
    pub(super) heard: Option<VecDeque<PageId>>,
}
