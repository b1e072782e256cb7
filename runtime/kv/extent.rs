//! How far a sequence goes.

/// How far a sequence goes that is to be [active](crate::KvPool::admit): its tokens, and those of its longest pass.
///
/// In layers with a [window](crate::KvLayout::with_windows) a pass reads its own tokens and the window of the first of
/// them. So a sequence that is read in short passes needs less room at a time. Where no layer has one, passes make no
/// difference.
///
/// ```
/// use outcore_kv::Extent;
///
/// let extent = Extent::new(5000).in_passes_of(512);
/// assert_eq!((extent.tokens(), extent.pass()), (5000, 512));
/// // All tokens may be appended at once.
/// assert_eq!(Extent::from(5000), Extent::new(5000).in_passes_of(5000));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    tokens: u64,
    pass: u64,
}

impl Extent {
    /// Up to so many tokens, in passes of any length.
    pub const fn new(tokens: u64) -> Self {
        Self { tokens, pass: tokens }
    }

    /// No more than so many tokens are [appended](crate::Sequence::append) at a time.
    #[must_use]
    pub const fn in_passes_of(self, tokens: u64) -> Self {
        Self { pass: tokens, ..self }
    }

    /// Tokens of the sequence.
    pub const fn tokens(self) -> u64 {
        self.tokens
    }

    /// Tokens of its longest pass.
    pub const fn pass(self) -> u64 {
        self.pass
    }

    /// Whether a sequence that goes so far may have `pass` tokens appended, and `end` in all then.
    pub(crate) const fn holds(self, end: u64, pass: u64) -> bool {
        end <= self.tokens && pass <= self.pass
    }
}

impl From<u64> for Extent {
    fn from(tokens: u64) -> Self {
        Self::new(tokens)
    }
}
