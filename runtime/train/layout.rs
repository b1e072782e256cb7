//! Where the elements of parameters lie, and how a step divides them.
//!
//! The parameters lie behind one another in one segment of `f32`, each beginning at a multiple of [`ALIGNMENT`]
//! elements. An element's *position* is its index in that segment. States, gradients and working copies have the same
//! positions in segments of their own.
//!
//! A step takes a *block* of positions at a time, as many as a page has of two-byte elements: one page of gradients in
//! `bf16`, and two of each tensor in `f32`. No two blocks share a page, so any number of threads work on blocks. A
//! *part* is what a block has of one parameter.

use std::ops::Range;

use outcore::{PageSize, Result};

use crate::errors::invalid;

/// As durable tensors are packed: 256 bytes of `f32`.
const ALIGNMENT: u64 = 64;

/// A parameter to be trained.
#[derive(Clone, Debug)]
pub(crate) struct Parameter {
    pub name: String,
    pub shape: Vec<u64>,
    pub elements: u64,
    /// The position of its first element.
    pub first: u64,
    /// The index of its group.
    pub group: usize,
    /// Its parts, in ascending order of positions.
    pub parts: Range<usize>,
}

/// What a block has of a parameter.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub parameter: usize,
    /// Elements of the parameter.
    pub within: Range<u64>,
    /// The position of the first of them.
    pub at: u64,
}

/// What is updated as one.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub positions: Range<u64>,
    /// Parts that lie in it, in ascending order of positions.
    pub parts: Range<usize>,
}

/// Positions of a block.
pub(crate) fn block_of(page: PageSize) -> u64 {
    page.bytes() / 2
}

#[derive(Debug)]
pub(crate) struct Layout {
    pub parameters: Vec<Parameter>,
    pub parts: Vec<Part>,
    pub blocks: Vec<Block>,
    /// Positions up to the end of the last parameter.
    pub positions: u64,
    /// Positions of a block; the last one may have fewer.
    pub block: u64,
}

impl Layout {
    /// The layout of parameters in this order: the name, the shape and the group of each.
    pub fn new(order: impl IntoIterator<Item = (String, Vec<u64>, usize)>, page: PageSize) -> Result<Self> {
        let block = block_of(page);
        let mut this = Self { parameters: Vec::new(), parts: Vec::new(), blocks: Vec::new(), positions: 0, block };
        for (name, shape, group) in order {
            let elements = shape.iter().try_fold(1u64, |product, extent| product.checked_mul(*extent));
            let first = this.positions.next_multiple_of(ALIGNMENT);
            // All positions are bytes of a segment.
            let end = elements.filter(|elements| *elements > 0).and_then(|elements| first.checked_add(elements));
            let Some(end) = end.filter(|end| *end <= i64::MAX as u64 / 4) else {
                let what = format!("the parameter {name:?} has the shape {shape:?}");
                return Err(invalid(what, "choose extents of at least 1 whose product is a size"));
            };
            this.positions = end;
            let parts = 0..0;
            this.parameters.push(Parameter { name, shape, elements: end - first, first, group, parts });
        }
        if this.parameters.is_empty() {
            return Err(invalid("an optimizer has no parameters".into(), "add a group with parameters"));
        }
        Ok(this)
    }

    /// Makes blocks and parts: when tensors of this size were made, so that there are not too many of them.
    pub fn divide(&mut self) {
        let Self { parameters, parts, blocks, positions, block } = self;
        blocks.extend((0..*positions).step_by(*block as usize).map(|start| {
            let end = (start + *block).min(*positions);
            Block { positions: start..end, parts: 0..0 }
        }));
        for (number, parameter) in parameters.iter_mut().enumerate() {
            let (first, end) = (parameter.first, parameter.first + parameter.elements);
            parameter.parts.start = parts.len();
            for at in first / *block..=(end - 1) / *block {
                let of_block = &mut blocks[at as usize];
                let (from, to) = (first.max(of_block.positions.start), end.min(of_block.positions.end));
                if of_block.parts.is_empty() {
                    of_block.parts = parts.len()..parts.len();
                }
                parts.push(Part { parameter: number, within: from - first..to - first, at: from });
                of_block.parts.end = parts.len();
            }
            parameter.parts.end = parts.len();
        }
    }

    /// The parts of a parameter that have any of these of its elements.
    pub fn parts_with(&self, parameter: usize, elements: Range<u64>) -> Range<usize> {
        let Parameter { first, parts, .. } = &self.parameters[parameter];
        if elements.is_empty() {
            return parts.start..parts.start;
        }
        let part = |element: u64| parts.start + ((first + element) / self.block - first / self.block) as usize;
        part(elements.start)..part(elements.end - 1) + 1
    }

    /// The blocks that have any of these elements of a parameter.
    pub fn blocks_with(&self, parameter: usize, elements: Range<u64>) -> Range<usize> {
        let parts = self.parts_with(parameter, elements);
        match parts.clone().next_back() {
            Some(last) => self.block_of(parts.start)..self.block_of(last) + 1,
            None => 0..0,
        }
    }

    pub fn block_of(&self, part: usize) -> usize {
        (self.parts[part].at / self.block) as usize
    }
}

#[cfg(test)]
mod tests {
    use outcore::Bytes;

    use super::*;

    #[test]
    fn parts_cover_each_parameter_once_and_lie_in_one_block() {
        let sizes = [1, 63, 64, 65, 40_000, 7, 1 << 15, 1];
        let order = sizes.iter().enumerate().map(|(at, size)| (format!("{at}"), vec![*size], 0));
        let mut layout = Layout::new(order, PageSize::new(Bytes::kib(16)).unwrap()).unwrap();
        layout.divide();
        for (number, parameter) in layout.parameters.iter().enumerate() {
            assert!(parameter.first.is_multiple_of(ALIGNMENT));
            let mut next = 0;
            for part in &layout.parts[parameter.parts.clone()] {
                assert_eq!((part.parameter, part.within.start, part.at), (number, next, parameter.first + next));
                next = part.within.end;
            }
            assert_eq!(next, sizes[number]);
            for (first, end) in [(0, 1), (0, next), (next - 1, next), (next / 3, next / 2)] {
                let has = |part: &usize| {
                    let within = &layout.parts[*part].within;
                    parameter.parts.contains(part) && within.start < end && first < within.end
                };
                let with: Vec<usize> = (0..layout.parts.len()).filter(has).filter(|_| first < end).collect();
                assert_eq!(layout.parts_with(number, first..end).collect::<Vec<_>>(), with, "{first}..{end}");
            }
        }
        let mut parts = 0;
        for (number, block) in layout.blocks.iter().enumerate() {
            assert_eq!((block.positions.start, block.parts.start), (number as u64 * layout.block, parts));
            for part in block.parts.clone() {
                let Part { within, at, .. } = &layout.parts[part];
                let end = at + within.end - within.start;
                assert!(block.positions.start <= *at && end <= block.positions.end);
                assert_eq!(layout.block_of(part), number);
            }
            parts = block.parts.end;
        }
        assert_eq!(parts, layout.parts.len());
    }
}
