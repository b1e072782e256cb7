//! Where keys and values lie in a block, and how large blocks are.

use std::ops::Range;

use outcore::{Bytes, DType, Error, ErrorKind, PageSize, Result};

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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    shape: KvShape,
    page: PageSize,
    tokens: u32,
    group: u32,
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
        let layouts = all.map(|(tokens, group)| Self { shape, page, tokens, group });
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
        let layout = Self { shape, page, tokens, group };
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

    /// What blocks of this layout, of this model, are known by. `model` names the weights, such as by a hash of their
    /// file.
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
        let layout = KvLayout { shape, page: page(16), tokens: 16, group: 2 };
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
            KvLayout { shape, page: page(16), tokens, group: 1 }.fingerprint(b"weights")
        };
        let one = of(4, DType::F16, 16);
        assert!([of(5, DType::F16, 16), of(4, DType::BF16, 16), of(4, DType::F16, 32)].iter().all(|it| *it != one));
        assert_eq!(one, of(4, DType::F16, 16));
    }
}
