//! Of which blocks a sequence sees the groups that are let go behind windows.

use std::collections::VecDeque;

use crate::state::State;
use crate::tables::{BlockId, Leaves};

/// The blocks of a sequence, from a number on to the last one, whose [parts](crate::tables) it sees. Empty where blocks
/// are whole. Whoever lets a block go leaves it here first.
#[derive(Debug)]
pub struct View {
    /// Whether blocks let groups go.
    lets_go: bool,
    first: usize,
    /// None for a block that the sequence does not have, or of which the part is gone.
    blocks: VecDeque<Option<BlockId>>,
}

impl View {
    /// Of the blocks of a sequence from number `first` on, which were found, and so have their parts.
    pub fn of(state: &mut State, lets_go: bool, first: usize, blocks: &[BlockId]) -> Self {
        let mut this = Self { lets_go, first, blocks: VecDeque::new() };
        blocks.iter().skip(first).for_each(|block| this.push(state, Some(*block)));
        this
    }

    /// Where blocks are whole.
    pub const fn none() -> Self {
        Self { lets_go: false, first: 0, blocks: VecDeque::new() }
    }

    /// The number of the first block.
    pub fn first(&self) -> usize {
        self.first
    }

    /// Whether the part of the block of this number is there.
    pub fn has(&self, nth: usize) -> bool {
        nth.checked_sub(self.first).is_some_and(|at| self.blocks.get(at).is_some_and(Option::is_some))
    }

    /// The sequence has one block more.
    pub fn push(&mut self, state: &mut State, block: Option<BlockId>) {
        if self.lets_go {
            self.blocks.push_back(block.filter(|block| state.tables.see(*block)));
        }
    }

    /// The window is behind all blocks before this number.
    pub fn move_on(&mut self, state: &mut State, first: usize) {
        while self.first < first {
            let Some(block) = self.blocks.pop_front() else { break };
            block.into_iter().for_each(|block| state.tables.unsee(block, Leaves::MovesOn));
            self.first += 1;
        }
    }

    /// The sequence has no more than the first `blocks` of these, and its window goes back to number `first`.
    /// Returns whether all parts that it sees then are still there; if not, nothing is changed.
    pub fn go_back(&mut self, state: &mut State, first: usize, table: &[Option<BlockId>], blocks: usize) -> bool {
        let more = table.get(first..self.first.min(blocks)).unwrap_or_default();
        if !more.iter().flatten().all(|block| state.tables.has_part(*block)) {
            return false;
        }
        self.cut(state, blocks);
        for block in more.iter().rev() {
            self.blocks.push_front(block.filter(|block| state.tables.see(*block)));
        }
        self.first = first;
        true
    }

    /// The sequence has no more blocks than so many.
    pub fn cut(&mut self, state: &mut State, blocks: usize) {
        let gone = self.blocks.split_off(blocks.saturating_sub(self.first).min(self.blocks.len()));
        gone.into_iter().rev().flatten().for_each(|block| state.tables.unsee(block, Leaves::Ends));
    }

    /// The sequence lets the block of this number go.
    pub fn leave(&mut self, state: &mut State, nth: usize) {
        let block = nth.checked_sub(self.first).and_then(|at| self.blocks.get_mut(at)).and_then(Option::take);
        block.into_iter().for_each(|block| state.tables.unsee(block, Leaves::MovesOn));
    }

    /// The sequence has another block of this number, which it uses already.
    pub fn replace(&mut self, state: &mut State, nth: usize, other: BlockId) {
        let Some(at) = nth.checked_sub(self.first).filter(|at| *at < self.blocks.len()) else { return };
        let other = Some(other).filter(|block| state.tables.see(*block));
        let before = std::mem::replace(&mut self.blocks[at], other);
        before.into_iter().for_each(|block| state.tables.unsee(block, Leaves::MovesOn));
    }

    /// That of a fork.
    pub fn fork(&self, state: &mut State) -> Self {
        let mut this = Self { blocks: VecDeque::with_capacity(self.blocks.len()), ..*self };
        self.blocks.iter().for_each(|block| this.push(state, *block));
        this
    }
}
