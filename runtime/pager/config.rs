//! The sizes that a pager begins with.

/// Sizes, in pages.
#[derive(Clone, Copy, Debug)]
pub struct PagerConfig {
    /// Frames of the device tier.
    pub frames: u32,
    /// Frames of the host tier.
    pub host_frames: u32,
    /// Buffers of the staging ring. Unused if `direct_io`.
    pub staging: u32,
    /// Whether disk and device frames exchange bytes directly.
    pub direct_io: bool,
    /// How many pages ahead of use fills start.
    pub lookahead: u32,
    /// Bytes of a page. Used in messages only.
    pub page_bytes: u64,
}
