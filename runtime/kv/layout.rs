//! Where keys and values lie in a block, and how large blocks are.

use std::num::NonZeroU32;
use std::ops::Range;

use outcore::{Bytes, DType, Error, ErrorKind, PageSize, Result};

use crate::extent::Extent;
use crate::key::Fingerprint;

/// The part of a block's pages that must hold bytes, in hundredths.
const FILL_LEAST: u64 = 95;
/// Tokens of a block: a multiple of the least, so that kernels find whole vectors. More than the most would be shared
/// too seldom.
const TOKENS_LEAST: u32 = 8;
const TOKENS_MOST: u32 = 256;
/// Tokens of a block that may be asked for.
const TOKENS_LIMIT: u32 = 4096;
/// The tokens of a block that are best, as in vLLM: what sequences share ends at a block.
const TOKENS_BEST: u32 = 16;

/// What a model keeps for each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    layers: u32,
    heads: u32,
    head_dim: u32,
    dtype: DType,
    row: u64,
}

impl KvShape {
    /// A model of `layers` layers, which keep a key and a value of `head_dim` elements of `dtype` for each of `heads`
    /// heads of keys and values (not of queries) and each token.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if one of the numbers is 0, if a row is no whole number of
    /// bytes or of the type's blocks, or if it is larger than 16 MiB.
    pub fn new(layers: u32, heads: u32, head_dim: u32, dtype: DType) -> Result<Self> {
        let row = dtype.bytes_for(u64::from(heads) * u64::from(head_dim)).filter(|row| (1..=16 << 20).contains(row));
        match row {
            Some(row) if layers > 0 => Ok(Self { layers, heads, head_dim, dtype, row }),
            _ => Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("{layers} layers of {heads} heads of {head_dim} {dtype} are no shape of keys and values"),
            )
            .remedy("take the numbers from the model's header: layers, heads of keys and values, elements of a head")),
        }
    }

    /// Layers.
    pub fn layers(&self) -> u32 {
        self.layers
    }
    /// Heads of keys and values.
    pub fn heads(&self) -> u32 {
        self.heads
    }
    /// Elements of a head.
    pub fn head_dim(&self) -> u32 {
        self.head_dim
    }
    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// Bytes of the keys, or of the values, of a token in a layer.
    pub fn row_bytes(&self) -> Bytes {
        Bytes::new(self.row)
    }
    /// Bytes of a token: keys and values of all layers.
    pub fn token_bytes(&self) -> Bytes {
        Bytes::new(2 * u64::from(self.layers) * self.row)
    }
}

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvPart {
    /// Keys.
    Keys,
    /// Values.
    Values,
}

/// How far a token sees in a layer that does not see all: itself, and those just before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KvWindow(NonZeroU32);

impl KvWindow {
    /// A window of so many tokens. A token sees itself, so they are at least one.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if they are none.
    pub fn new(tokens: u32) -> Result<Self> {
        NonZeroU32::new(tokens).map(Self).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, "a window of 0 tokens")
                .remedy("count the token itself, or give layers that see all no window")
        })
    }
    /// The tokens that one sees, itself included.
    pub const fn tokens(self) -> u32 {
        self.0.get()
    }
    /// The first position that the token at `position` sees.
    fn first(self, position: u64) -> u64 {
        (position + 1).saturating_sub(u64::from(self.tokens()))
    }
}

/// How the keys and values of a model lie in blocks.
///
/// A block holds the keys and values of some tokens that follow one another, for some layers that follow one another (a
/// *group*). Its bytes are, outermost first,
///
/// ```text
/// [layers of the group][keys, values][tokens of a block][heads of keys and values][elements of a head]
/// ```
///
/// So what a layer writes for a token is contiguous (a *row*), and so are all keys of a layer in a block, and its
/// values. A block begins at a page and fills whole pages, but for less than a twentieth.
///
/// Where tokens see only those [just before them](Self::with_windows) in all layers of a group, passes read only the
/// last blocks of that group. The others are kept all the same: another sequence may begin with them. A pool that is to
/// use their room [lets them go](Self::letting_go).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    shape: KvShape,
    page: PageSize,
    tokens: u32,
    group: u32,
    /// By group. None at all if no group has one.
    windows: Vec<Option<KvWindow>>,
    /// Whether groups with a window are let go behind it.
    lets_go: bool,
}

impl KvLayout {
    /// The layout for pages of this size: blocks of about 16 tokens, in few pages, of several groups of layers where
    /// there are several layers.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if no block of 8 to 256 tokens fills whole pages to 95 %.
    pub fn new(shape: KvShape, page: PageSize) -> Result<Self> {
        let tokens = (TOKENS_LEAST..=TOKENS_MOST).step_by(TOKENS_LEAST as usize);
        let all = tokens.flat_map(|tokens| (1..=shape.layers).map(move |group| (tokens, group)));
        let layouts =
            all.map(|(tokens, group)| Self { shape, page, tokens, group, windows: Vec::new(), lets_go: false });
        let fitting = layouts.filter(|layout| layout.fill_percent() >= FILL_LEAST);
        fitting.min_by_key(Self::badness).ok_or_else(|| {
            let token = shape.token_bytes();
            let message = format!(
                "no block of {TOKENS_LEAST} to {TOKENS_MOST} tokens of {token} fills whole pages of {} to {FILL_LEAST} %",
                Bytes::new(page.bytes())
            );
            Error::new(ErrorKind::InvalidArgument, message).remedy("choose smaller pages for the runtime")
        })
    }

    /// The layout with blocks of `tokens` tokens and groups of `group` layers.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if one of them is 0, if the group has more layers than the
    /// model, or if such blocks do not fill whole pages to 95 %.
    pub fn with(shape: KvShape, page: PageSize, tokens: u32, group: u32) -> Result<Self> {
        let layout = Self { shape, page, tokens, group, windows: Vec::new(), lets_go: false };
        if !(1..=TOKENS_LIMIT).contains(&tokens) || !(1..=shape.layers).contains(&group) {
            let layers = shape.layers;
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("blocks of {tokens} tokens of {group} layers, of a model with {layers} layers"),
            )
            .remedy(format!("choose 1 to {TOKENS_LIMIT} tokens, and groups of 1 to {layers} layers")));
        }
        if layout.fill_percent() < FILL_LEAST {
            let best = Self::new(shape, page).map(|best| format!("{} tokens of {} layers", best.tokens, best.group));
            let message = format!(
                "blocks of {tokens} tokens of {group} layers fill their pages of {} to {} %",
                Bytes::new(page.bytes()),
                layout.fill_percent()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy(match best {
                Ok(best) => format!("choose blocks of {best}"),
                Err(_) => "choose smaller pages for the runtime".into(),
            }));
        }
        Ok(layout)
    }

    /// The layout for a model with these windows, by layer. A group has one if all its layers have: the largest of
    /// theirs. Groups of one layer so read least.
    ///
    /// ```
    /// use outcore::{Bytes, DType, PageSize};
    /// use outcore_kv::{KvLayout, KvShape, KvWindow};
    ///
    /// let layout = KvLayout::with(KvShape::new(4, 2, 64, DType::F32)?, PageSize::new(Bytes::kib(16))?, 16, 1)?;
    /// let window = KvWindow::new(100)?;
    /// let layout = layout.with_windows(|layer| (layer % 2 == 0).then_some(window));
    /// assert_eq!([layout.window_of(2), layout.window_of(3)], [Some(window), None]);
    /// // The token at position 1000 sees those from 901 on.
    /// assert_eq!([layout.first_read(2, 1000), layout.first_read(3, 1000)], [901 / 16, 0]);
    /// # Ok::<(), outcore::Error>(())
    /// ```
    #[must_use]
    pub fn with_windows(mut self, of_layer: impl Fn(u32) -> Option<KvWindow>) -> Self {
        let of_group = |group: u32| {
            let windows: Option<Vec<KvWindow>> = self.layers_of(group).map(&of_layer).collect();
            windows?.into_iter().max()
        };
        let windows: Vec<_> = (0..self.groups()).map(of_group).collect();
        self.windows = if windows.iter().any(Option::is_some) { windows } else { Vec::new() };
        self
    }

    /// The layout for a pool in which blocks let the groups with a [window](Self::with_windows) go once it is behind
    /// them: when all sequences that use a block have [committed](crate::Sequence::commit) so much that none will see
    /// it in these groups, their room is for other blocks. So a long sequence has room for all of its tokens in the
    /// other groups, and in these for those of a window and a pass.
    ///
    /// What is let go cannot be read any more, or gone back to by [`Sequence::truncate`](crate::Sequence::truncate),
    /// but for the tokens of the last pass: that is an error. A sequence begins with the longest prefix of which all is
    /// there that its next token sees. The groups of a block do not follow one another in memory. It says nothing where
    /// no group has a window, nor for a pool with a [store](crate::KvPool::open_with_store), which keeps whole blocks.
    #[must_use]
    pub fn letting_go(mut self) -> Self {
        self.lets_go = true;
        self
    }

    /// Whether blocks [let groups go](Self::letting_go).
    pub fn lets_go(&self) -> bool {
        self.lets_go && self.has_windows()
    }

    /// As it is for a pool in which blocks are whole.
    pub(crate) fn keeping(mut self) -> Self {
        self.lets_go = false;
        self
    }

    /// Whether a group is let go behind its window.
    pub(crate) fn is_let_go(&self, group: u32) -> bool {
        self.lets_go && self.window_of(group).is_some()
    }

    /// Groups that blocks have until nobody uses them, and those that they let go.
    pub(crate) fn kept_and_let_go(&self) -> [u32; 2] {
        let let_go = (0..self.groups()).filter(|group| self.is_let_go(*group)).count() as u32;
        [self.groups() - let_go, let_go]
    }

    /// How many blocks a pool may have, of the room of so many whole ones.
    pub(crate) fn blocks_most(&self, whole: u32) -> u32 {
        let [kept, let_go] = self.kept_and_let_go().map(u64::from);
        let blocks = u64::from(whole) * (kept + let_go) / kept.max(1);
        u32::try_from(blocks).map_or(u32::MAX - 1, |blocks| blocks.min(u32::MAX - 1))
    }

    /// The number of the first block of which a sequence has groups that are let go, if the next pass begins at this
    /// position: as the largest window says.
    pub(crate) fn first_kept(&self, position: u64) -> usize {
        self.let_go_behind().map_or(0, |window| self.first_within(window, position))
    }

    /// The window behind which groups are let go: the largest of theirs.
    pub(crate) fn let_go_behind(&self) -> Option<KvWindow> {
        if self.lets_go { self.windows.iter().copied().flatten().max() } else { None }
    }

    /// The number of the first block within this window of the token at this position.
    pub(crate) fn first_within(&self, window: KvWindow, position: u64) -> usize {
        (window.first(position) / u64::from(self.tokens)) as usize
    }

    /// The most room that blocks of a sequence that goes so far have in a pool, which is what such a pool needs at
    /// least.
    pub fn room_most(&self, extent: impl Into<Extent>) -> Bytes {
        Bytes::new(self.kept_parts_most(extent.into()).saturating_mul(self.block_room().get()))
    }

    /// As [`room_most`](Self::room_most), in parts.
    pub(crate) fn kept_parts_most(&self, extent: Extent) -> u64 {
        let [kept, let_go] = self.kept_and_let_go().map(u64::from);
        let all = extent.tokens().div_ceil(u64::from(self.tokens));
        let within = self.let_go_behind().map_or(all, |window| self.blocks_within(window, extent));
        // Where all groups are let go, a sequence still has a number for each of its blocks (`blocks_most`).
        kept.saturating_mul(all).saturating_add(let_go.saturating_mul(within)).max(all)
    }

    /// The most blocks that a pass of a sequence that goes so far reads in a group with this window.
    fn blocks_within(&self, window: KvWindow, extent: Extent) -> u64 {
        let each = u64::from(self.tokens);
        // Of the tokens that a pass reads, all but one may begin with the last of a block.
        let others = (u64::from(window.tokens()) - 1).saturating_add(extent.pass().max(1) - 1);
        extent.tokens().div_ceil(each).min(others.div_ceil(each).saturating_add(1))
    }

    /// How much worse than the best: by tokens of a block (a factor of two is one), pages of a block, and how few
    /// groups there are to overlap their use with others' fills.
    fn badness(&self) -> u64 {
        let tokens = (f64::from(self.tokens) / f64::from(TOKENS_BEST)).log2().abs();
        let pages = (self.pages() as f64).log2();
        let few = [4.0, 1.0, 0.5].get(self.groups() as usize - 1).copied().unwrap_or(0.0);
        let many = (f64::from(self.groups()) / 16.0).log2().max(0.0);
        ((2.0 * tokens + pages + few + many) * 1e6) as u64
    }

    fn fill_percent(&self) -> u64 {
        let held = u128::from(self.shape.token_bytes().get()) * u128::from(self.tokens);
        let room = u128::from(self.groups()) * u128::from(self.block_room().get());
        (100 * held / room) as u64
    }

    /// The model's shape.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }
    /// The page size that it is for.
    pub fn page_size(&self) -> PageSize {
        self.page
    }
    /// Tokens of a block.
    pub fn block_tokens(&self) -> u32 {
        self.tokens
    }
    /// Layers of a group; the last group may have fewer.
    pub fn group_layers(&self) -> u32 {
        self.group
    }
    /// Groups of layers.
    pub fn groups(&self) -> u32 {
        self.shape.layers.div_ceil(self.group)
    }
    /// The layers of a group.
    pub fn layers_of(&self, group: u32) -> Range<u32> {
        let first = group.saturating_mul(self.group).min(self.shape.layers);
        first..first.saturating_add(self.group).min(self.shape.layers)
    }
    /// The group of a layer, and the layer's place in it.
    pub fn group_of(&self, layer: u32) -> (u32, u32) {
        (layer / self.group, layer % self.group)
    }
    /// Bytes of a block that hold keys and values, of a group with all its layers.
    pub fn block_bytes(&self) -> Bytes {
        Bytes::new(2 * u64::from(self.group) * u64::from(self.tokens) * self.shape.row)
    }
    /// Pages of a block.
    pub fn pages(&self) -> u64 {
        self.page.pages_for(self.block_bytes().get())
    }
    /// Bytes of these pages.
    pub fn block_room(&self) -> Bytes {
        Bytes::new(self.pages() * self.page.bytes())
    }

    /// Where a token's row begins in a block: of the layer at place `layer` of the block's group, and of the token at
    /// place `token` of the block. `None` if there is no such place.
    pub fn row(&self, layer: u32, part: KvPart, token: u32) -> Option<Range<usize>> {
        if layer >= self.group || token >= self.tokens {
            return None;
        }
        let part = u64::from(part == KvPart::Values);
        let nth = (2 * u64::from(layer) + part) * u64::from(self.tokens) + u64::from(token);
        let start = (nth * self.shape.row) as usize;
        Some(start..start + self.shape.row as usize)
    }

    /// The keys, or the values, of all tokens of a block in a layer.
    pub fn rows(&self, layer: u32, part: KvPart) -> Option<Range<usize>> {
        let first = self.row(layer, part, 0)?;
        Some(first.start..first.start + first.len() * self.tokens as usize)
    }

    /// The window of a group, if none of its layers sees all.
    pub fn window_of(&self, group: u32) -> Option<KvWindow> {
        self.windows.get(group as usize).copied().flatten()
    }

    /// Whether a group has a window.
    pub(crate) fn has_windows(&self) -> bool {
        !self.windows.is_empty()
    }

    /// The number, in its sequence, of the first block that the token at this position sees in a group.
    pub fn first_read(&self, group: u32, position: u64) -> u64 {
        self.window_of(group).map_or(0, |window| window.first(position) / u64::from(self.tokens))
    }

    /// The pages that a pass over the tokens at these positions uses: those of the blocks that it reads in each group,
    /// and writes.
    pub fn pass_bytes(&self, positions: Range<u64>) -> Bytes {
        Bytes::new(self.parts_of(&positions).saturating_mul(self.block_room().get()))
    }

    /// As [`pass_bytes`](Self::pass_bytes), in parts: blocks of one group.
    pub(crate) fn parts_of(&self, positions: &Range<u64>) -> u64 {
        let end = positions.end.div_ceil(u64::from(self.tokens));
        (0..self.groups()).map(|group| end.saturating_sub(self.first_read(group, positions.start))).sum()
    }

    /// The most parts that a pass of a sequence that goes so far can use, wherever in it the pass is.
    pub(crate) fn parts_most(&self, extent: Extent) -> u64 {
        let all = extent.tokens().div_ceil(u64::from(self.tokens));
        let of_group = |group| self.window_of(group).map_or(all, |window| self.blocks_within(window, extent));
        (0..self.groups()).map(of_group).fold(0, u64::saturating_add)
    }

    /// What blocks of this layout, of this model, are known by. `model` names the weights, such as by a hash of their
    /// file. Windows do not count: a block has the same bytes, however far later tokens see.
    pub fn fingerprint(&self, model: &[u8]) -> Fingerprint {
        let Self { shape, tokens, group, .. } = self;
        let numbers = [shape.layers, shape.heads, shape.head_dim, *tokens, *group].map(u32::to_le_bytes);
        Fingerprint::of(&[b"outcore-kv 1", model, shape.dtype.name().as_bytes(), numbers.as_flattened()])
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;

    fn page(kib: u64) -> PageSize {
        PageSize::new(Bytes::kib(kib)).unwrap()
    }

    #[test]
    fn blocks_fill_whole_pages() {
        // SmolLM2-135M, Llama-3 8B and 70B, a model with one head, Gemma's 18 layers, 61 layers of DeepSeek's 576.
        for (layers, heads, head_dim) in
            [(30, 3, 64), (32, 8, 128), (80, 8, 128), (24, 1, 64), (18, 1, 256), (61, 1, 576)]
        {
            for dtype in [DType::F16, DType::F32, DType::BF16] {
                for kib in [16, 64, 256, 2048] {
                    let shape = KvShape::new(layers, heads, head_dim, dtype).unwrap();
                    let layout = match KvLayout::new(shape, page(kib)) {
                        Ok(layout) => layout,
                        Err(error) => {
                            let most = shape.token_bytes().get() * u64::from(TOKENS_MOST);
                            assert!(most < 2 * (kib << 10), "{shape:?}, {kib} KiB: {error}");
                            continue;
                        }
                    };
                    let held = shape.token_bytes().get() * u64::from(layout.block_tokens());
                    let room = layout.block_room().get() * u64::from(layout.groups());
                    assert!(held * 100 >= room * 95, "{layout:?}");
                    assert!(layout.groups() > 1 || kib == 2048, "{layout:?}");
                    let again = KvLayout::with(shape, page(kib), layout.block_tokens(), layout.group_layers());
                    assert_eq!(again.unwrap(), layout);
                }
            }
        }
    }

    /// As `docs/kv.md` says.
    #[test]
    fn what_is_chosen_for_known_models() {
        for (layers, heads, head_dim, kib, tokens, group, pages) in [
            (30, 3, 64, 64, 56, 3, 2),
            (32, 8, 128, 64, 16, 1, 1),
            (32, 8, 128, 256, 16, 4, 1),
            (32, 8, 128, 2048, 32, 16, 1),
            (80, 8, 128, 2048, 32, 16, 1),
            (48, 4, 128, 256, 16, 8, 1),
        ] {
            let shape = KvShape::new(layers, heads, head_dim, DType::F16).unwrap();
            let layout = KvLayout::new(shape, page(kib)).unwrap();
            assert_eq!(
                (layout.block_tokens(), layout.group_layers(), layout.pages()),
                (tokens, group, pages),
                "{shape:?}"
            );
        }
    }

    #[test]
    fn rows_lie_beside_each_other_and_fill_the_block() {
        let shape = KvShape::new(5, 2, 64, DType::F16).unwrap();
        // The last group has one layer, so this would be refused.
        let layout = KvLayout { shape, page: page(16), tokens: 16, group: 2, windows: Vec::new(), lets_go: false };
        let mut end = 0;
        for layer in 0..2 {
            for part in [KvPart::Keys, KvPart::Values] {
                assert_eq!(layout.rows(layer, part).unwrap().start, end);
                for token in 0..16 {
                    let row = layout.row(layer, part, token).unwrap();
                    assert_eq!(row.start, end);
                    end = row.end;
                }
                assert_eq!(layout.rows(layer, part).unwrap().end, end);
            }
        }
        assert_eq!(end as u64, layout.block_bytes().get());
        assert!(layout.row(2, KvPart::Keys, 0).is_none() && layout.row(0, KvPart::Keys, 16).is_none());
        assert_eq!((layout.groups(), layout.layers_of(2), layout.group_of(4)), (3, 4..5, (2, 0)));
        assert_eq!(layout.layers_of(9), 5..5);
    }

    #[test]
    fn a_group_has_the_largest_window_of_its_layers_if_all_have_one() {
        let windows =
            [Some(5), Some(9), None, Some(7), Some(3)].map(|tokens| tokens.map(|n| KvWindow::new(n).unwrap()));
        let shape = KvShape::new(5, 2, 64, DType::F16).unwrap();
        let of = |group| {
            let layout = KvLayout { shape, page: page(16), tokens: 4, group, windows: Vec::new(), lets_go: false };
            let whole = layout.clone();
            (layout.with_windows(|layer| windows[layer as usize]), whole)
        };
        let (single, whole) = of(1);
        assert_eq!([0, 1, 2, 3, 4, 5].map(|group| single.window_of(group)), [&windows[..], &[None]].concat()[..]);
        let pairs = of(2).0;
        assert_eq!([0, 1, 2].map(|group| pairs.window_of(group)), [windows[1], None, windows[4]]);
        assert_eq!(of(3).0.window_of(0), None);
        assert_eq!(single.clone().with_windows(|_| None), whole);
        assert_eq!(single.fingerprint(b"weights"), whole.fingerprint(b"weights"));
        assert!(KvWindow::new(0).unwrap_err().advice().is_some());
    }

    /// Counted position by position: no pass uses more parts than is said, and some pass uses as many.
    #[test]
    fn what_passes_use_at_most_is_what_the_worst_of_them_uses() {
        let shape = KvShape::new(3, 2, 64, DType::F16).unwrap();
        for (each, window) in [(4, 1), (4, 4), (4, 5), (8, 3), (8, 9), (8, 20), (1, 6)] {
            let layout =
                KvLayout { shape, page: page(16), tokens: each, group: 1, windows: Vec::new(), lets_go: false };
            let layout = layout.with_windows(|layer| (layer > 0).then(|| KvWindow::new(window).unwrap()));
            for (tokens, pass) in [(1, 1), (7, 1), (7, 7), (90, 1), (90, 2), (90, 5), (90, 17), (90, 90)] {
                let used = |start: u64| {
                    let end = (start + pass).min(tokens);
                    let of_layer = |layer| {
                        let sees = |position: u64| layer == 0 || position + u64::from(window) > start;
                        let blocks = (0..end).filter(|position| sees(*position)).map(|at| at / u64::from(each));
                        blocks.collect::<std::collections::BTreeSet<_>>().len() as u64
                    };
                    let parts = (0..3).map(of_layer).sum();
                    assert_eq!(layout.parts_of(&(start..end)), parts);
                    assert_eq!(layout.pass_bytes(start..end), Bytes::new(parts * layout.block_room().get()));
                    parts
                };
                let most = (0..tokens).map(used).max();
                let said = layout.parts_most(Extent::new(tokens).in_passes_of(pass));
                assert_eq!(Some(said), most, "blocks of {each}, window {window}, {tokens} tokens by {pass}");
            }
            let huge = layout.parts_most(Extent::new(u64::MAX).in_passes_of(u64::MAX));
            assert!(huge >= layout.parts_most(Extent::new(1 << 40)));
        }
    }

    #[test]
    fn what_fits_no_page_is_refused() {
        assert!(KvShape::new(0, 2, 64, DType::F16).is_err() && KvShape::new(1, 0, 64, DType::F16).is_err());
        assert!(KvShape::new(1, 1, 33, DType::Q8_0).is_err());
        assert!(KvShape::new(1, u32::MAX, u32::MAX, DType::F32).is_err());
        let tiny = KvShape::new(2, 1, 8, DType::F16).unwrap();
        let error = KvLayout::new(tiny, PageSize::DEFAULT).unwrap_err();
        assert!(error.to_string().contains("2.0 MiB") && error.advice().unwrap().contains("smaller pages"), "{error}");
        let shape = KvShape::new(30, 3, 64, DType::F16).unwrap();
        let error = KvLayout::with(shape, page(64), 9, 1).unwrap_err();
        assert!(error.to_string().contains("9 tokens of 1 layers") && error.advice().unwrap().contains("blocks of"));
        for (tokens, group) in [(0, 1), (16, 0), (16, 31), (5000, 1)] {
            assert!(KvLayout::with(shape, page(64), tokens, group).is_err());
        }
    }

    #[test]
    fn a_fingerprint_depends_on_all_that_bytes_depend_on() {
        let of = |layers, dtype, tokens| {
            let shape = KvShape::new(layers, 2, 64, dtype).unwrap();
            KvLayout { shape, page: page(16), tokens, group: 1, windows: Vec::new(), lets_go: false }
                .fingerprint(b"weights")
        };
        let one = of(4, DType::F16, 16);
        assert!([of(5, DType::F16, 16), of(4, DType::BF16, 16), of(4, DType::F16, 32)].iter().all(|it| *it != one));
        assert_eq!(one, of(4, DType::F16, 16));
    }
}
