//! Sequences of a model of test, which know what they should read.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::ops::Range;

use outcore::{Bytes, DType, PageSize, PolicyKind, Runtime};
use outcore_kv::{ActiveOptions, KvLayout, KvPart, KvPool, KvShape, KvWindow, Sequence, TenantId, Token};

pub const PAGE: u64 = 16 << 10;
pub const LAYERS: u32 = 5;
const PARTS: [KvPart; 2] = [KvPart::Keys, KvPart::Values];
pub const A: TenantId = TenantId::new(1);
pub const B: TenantId = TenantId::new(2);

pub fn runtime(pages: u64) -> Runtime {
    runtime_with(pages, PolicyKind::Kv)
}

pub fn runtime_with(pages: u64, policy: PolicyKind) -> Runtime {
    let page = PageSize::new(Bytes::new(PAGE)).unwrap();
    let budget = Bytes::new(pages * PAGE);
    Runtime::builder().page_size(page).device_budget(budget).policy(policy).open().unwrap()
}

pub fn layout() -> KvLayout {
    let shape = KvShape::new(LAYERS, 2, 64, DType::F16).unwrap();
    let layout = KvLayout::with(shape, PageSize::new(Bytes::new(PAGE)).unwrap(), 32, 1).unwrap();
    assert_eq!((layout.groups(), layout.pages()), (5, 1));
    layout
}

/// As [`layout`], with these windows by layer; 0 is none.
pub fn windowed(windows: [u32; LAYERS as usize]) -> KvLayout {
    layout().with_windows(|layer| KvWindow::new(windows[layer as usize]).ok())
}

/// As [`windowed`], for a pool in which blocks let groups go.
pub fn letting_go(windows: [u32; LAYERS as usize]) -> KvLayout {
    windowed(windows).letting_go()
}

pub fn pool(runtime: &Runtime, blocks: u32) -> KvPool {
    KvPool::open(runtime, layout(), b"a model", blocks).unwrap()
}

pub fn tokens(numbers: Range<u32>) -> Vec<Token> {
    numbers.map(Token::new).collect()
}

/// What a model of test computes for the last of these tokens: it depends on all of them.
fn value(tokens: &[Token], layer: u32, part: KvPart) -> u8 {
    let mut state = u64::from(layer) << 1 | u64::from(part == KvPart::Values);
    for token in tokens {
        state = (state ^ u64::from(token.get())).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23);
    }
    (state >> 40) as u8
}

/// A sequence, and the tokens that it should have.
pub struct Said {
    pub sequence: Sequence,
    pub tokens: Vec<Token>,
    /// The first position that its window has left, and the one behind the last.
    pub left: Range<u64>,
}

impl Said {
    pub fn begin(pool: &KvPool, tenant: TenantId, prompt: &[Token]) -> outcore::Result<Self> {
        let sequence = pool.begin(tenant, prompt)?;
        let found = sequence.len() as usize;
        let mut this = Self { sequence, tokens: prompt[..found].to_vec(), left: 0..0 };
        this.say(&prompt[found..])?;
        Ok(this)
    }

    /// Appends tokens, computes them and commits them.
    pub fn say(&mut self, more: &[Token]) -> outcore::Result<()> {
        let positions = self.sequence.append(more)?;
        self.tokens.extend_from_slice(more);
        let layout = self.sequence.pool().layout().clone();
        for layer in 0..LAYERS {
            let (group, place) = layout.group_of(layer);
            let mut blocks = self.sequence.write(group, positions.clone())?;
            let mut guard = blocks.pin().wait()?;
            let first = self.sequence.place(positions.start).0;
            for position in positions.clone() {
                let (nth, token) = self.sequence.place(position);
                for part in PARTS {
                    let row = layout.row(place, part, token).unwrap();
                    let value = value(&self.tokens[..=position as usize], layer, part);
                    guard.bytes_mut(nth - first).unwrap()[row].fill(value);
                }
            }
        }
        self.sequence.commit(positions.end)
    }

    /// Reads all of it: others may begin with it. Of what is let go, what the next pass reads.
    pub fn check(&self) {
        let layout = self.sequence.pool().layout();
        let first = |layer| match layout.lets_go() {
            true => layout.first_read(layout.group_of(layer).0, self.sequence.len()),
            false => 0,
        };
        (0..LAYERS).for_each(|layer| self.check_from(layer, first(layer)));
    }

    /// Reads what a pass over the next token reads.
    pub fn check_seen(&self) {
        let layout = self.sequence.pool().layout().clone();
        let first = |layer| layout.first_read(layout.group_of(layer).0, self.sequence.len());
        (0..LAYERS).for_each(|layer| self.check_from(layer, first(layer)));
    }

    fn check_from(&self, layer: u32, first: u64) {
        assert_eq!(self.sequence.len(), self.tokens.len() as u64);
        let layout = self.sequence.pool().layout();
        let each = u64::from(layout.block_tokens());
        let (group, place) = layout.group_of(layer);
        for start in (first * each..self.sequence.len()).step_by(each as usize) {
            let positions = start..(start + each).min(self.sequence.len());
            if self.left.start <= positions.start && positions.end <= self.left.end {
                continue;
            }
            let blocks = self.sequence.read(group, positions.clone()).unwrap();
            let guard = blocks.pin().wait().unwrap();
            for position in positions {
                for part in PARTS {
                    let row = layout.row(place, part, (position % each) as u32).unwrap();
                    let value = value(&self.tokens[..=position as usize], layer, part);
                    let found = &guard.bytes(0).unwrap()[row];
                    assert!(found.iter().all(|byte| *byte == value), "position {position}, layer {layer}");
                }
            }
        }
    }
}

pub fn active(most: u32, reserve: u32) -> ActiveOptions {
    let mut options = ActiveOptions::default();
    (options.blocks_most, options.reserve) = (Some(most), Some(reserve));
    options
}
