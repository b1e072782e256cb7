//! Arguments that several commands have.

use outcore::{Bytes, PageSize, Result};

/// The size of a page, as it is given on the command line.
pub fn page_size(text: &str) -> Result<PageSize> {
    PageSize::new(text.parse::<Bytes>()?)
}
