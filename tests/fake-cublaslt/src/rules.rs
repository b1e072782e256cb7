//! Which products there are, and which algorithm each gets.

use crate::abi::*;
use crate::descriptors::{Desc, Layout, Preference};

/// What an algorithm of this library begins with.
const MARK: u64 = 0x6c74_616c_676f;
/// The widest load of an algorithm, in bytes.
const WIDEST: u64 = 16;
/// What the address of a workspace is a multiple of.
const WORKSPACE_ALIGNMENT: u64 = 256;

/// A product whose sizes fit each other: D is `m` x `n`, and `k` numbers are summed for each of its elements.
#[derive(Clone, Copy)]
pub struct Shape {
    pub desc: Desc,
    /// A, B, C and D.
    pub layouts: [Layout; 4],
    pub m: u64,
    pub n: u64,
    pub k: u64,
}

fn bytes_of(kind: u32) -> u64 {
    if kind == R_32F { 4 } else { 2 }
}

impl Shape {
    pub fn new(desc: Desc, layouts: [Layout; 4]) -> Outcome<Self> {
        let [a, b, c, d] = layouts;
        let of = |layout: &Layout, transposed: bool| {
            if transposed { (layout.cols, layout.rows) } else { (layout.rows, layout.cols) }
        };
        let ((m, k), (same_k, n)) = (of(&a, desc.transposed[0]), of(&b, desc.transposed[1]));
        let fit = k == same_k && (d.rows, d.cols) == (m, n) && (c.rows, c.cols) == (m, n);
        // A count of batches is an i32.
        let counted = |l: &Layout| l.batch > 0 && l.batch <= i32::MAX as u64 && l.batch == d.batch;
        let full = layouts.iter().all(|l| l.rows > 0 && l.cols > 0 && counted(l));
        let dense = layouts.iter().all(|l| u64::try_from(l.ld).is_ok_and(|ld| ld >= l.rows) && l.stride >= 0);
        if !fit || !full || !dense {
            return Err(INVALID_VALUE);
        }
        let types = matches!(a.kind, R_16F | R_16BF) && a.kind == b.kind && c.kind == R_32F && d.kind == R_32F;
        // A result that several batches have would be written at once: batches lie behind one another, or between the
        // columns of the others.
        let (stride, ld) = (d.stride as u64, d.ld as u64);
        let behind = stride >= (d.cols - 1) * ld + d.rows;
        let between = stride >= d.rows && (d.batch - 1) * stride + d.rows <= ld;
        let apart = d.batch == 1 || behind || between;
        if !types || !apart || c != d || (desc.compute, desc.scale) != (COMPUTE_32F, R_32F) {
            return Err(NOT_SUPPORTED);
        }
        Ok(Self { desc, layouts, m, n, k })
    }
}

/// The largest power of two that divides all, at most `WIDEST`.
fn alignment(all: &[u64]) -> u64 {
    all.iter().fold(WIDEST, |least, &n| if n == 0 { least } else { least.min(1 << n.trailing_zeros()) })
}

pub fn heuristic(shape: &Shape, preference: &Preference) -> Outcome<Algo> {
    let alignments = [0, 1, 2, 3].map(|i| {
        let (layout, wanted) = (&shape.layouts[i], preference.alignments[i]);
        let bytes = bytes_of(layout.kind);
        alignment(&[wanted, layout.ld as u64 * bytes, layout.stride as u64 * bytes])
    });
    let one_more = 4 * shape.m * shape.n * shape.layouts[3].batch;
    let workspace = if one_more <= preference.workspace { one_more } else { 0 };
    if alignments.iter().zip(&shape.layouts).any(|(have, layout)| *have < bytes_of(layout.kind)) {
        return Err(NOT_SUPPORTED);
    }
    Ok(Algo { mark: MARK, alignments, workspace, rest: [0; 2] })
}

/// Whether the algorithm can have these matrices and this workspace; the part of the workspace that it uses.
pub fn check(shape: &Shape, algo: &Algo, addresses: [u64; 4], (workspace, bytes): (u64, u64)) -> Outcome<(u64, u64)> {
    let one_more = 4 * shape.m * shape.n * shape.layouts[3].batch;
    if algo.mark != MARK || ![0, one_more].contains(&algo.workspace) || addresses.contains(&0) {
        return Err(INVALID_VALUE);
    }
    if addresses.iter().zip(algo.alignments).any(|(address, wanted)| !address.is_multiple_of(wanted)) {
        return Err(NOT_SUPPORTED);
    }
    if algo.workspace > bytes || (algo.workspace > 0 && !workspace.is_multiple_of(WORKSPACE_ALIGNMENT)) {
        return Err(INVALID_VALUE);
    }
    Ok((workspace, algo.workspace))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    const DESC: Desc = Desc { compute: COMPUTE_32F, scale: R_32F, transposed: [true, false] };

    fn layout(kind: u32, rows: u64, cols: u64, ld: i64) -> Layout {
        Layout { kind, rows, cols, ld, batch: 1, stride: 0 }
    }

    /// 5 rows of 24 weights times 3 vectors.
    fn layouts() -> [Layout; 4] {
        let d = layout(R_32F, 5, 3, 6);
        [layout(R_16F, 24, 5, 24), layout(R_16F, 24, 3, 24), d, d]
    }

    #[test]
    fn sizes_and_types_that_do_not_fit_are_refused() {
        let shape = Shape::new(DESC, layouts()).unwrap();
        assert_eq!((shape.m, shape.n, shape.k), (5, 3, 24));
        let refused = |change: fn(&mut [Layout; 4])| {
            let mut changed = layouts();
            change(&mut changed);
            Shape::new(DESC, changed).err()
        };
        assert_eq!(refused(|l| l[0].rows = 23), Some(INVALID_VALUE));
        assert_eq!(refused(|l| l[0].ld = 23), Some(INVALID_VALUE));
        assert_eq!(refused(|l| l[1].cols = 4), Some(INVALID_VALUE));
        assert_eq!(refused(|l| l[1].batch = 2), Some(INVALID_VALUE));
        assert_eq!(refused(|l| l[1].kind = R_16BF), Some(NOT_SUPPORTED));
        assert_eq!(refused(|l| l[2].ld = 7), Some(NOT_SUPPORTED));
        assert_eq!(refused(|l| l[3].kind = R_16F), Some(NOT_SUPPORTED));
        let other = Desc { compute: 64, ..DESC };
        assert_eq!(Shape::new(other, layouts()).err(), Some(NOT_SUPPORTED));
    }

    #[test]
    fn batches_are_as_many_in_all_matrices_and_no_result_is_in_two() {
        let with = |counts: [u64; 4], strides: [i64; 4]| {
            let mut layouts = layouts();
            for (layout, (batch, stride)) in layouts.iter_mut().zip(counts.into_iter().zip(strides)) {
                (layout.batch, layout.stride) = (batch, stride);
            }
            layouts[3] = layouts[2];
            Shape::new(DESC, layouts).err()
        };
        // Matrices that all batches share may be read.
        assert_eq!(with([3; 4], [0, 72, 18, 18]), None);
        // Two columns of six, and five more.
        assert_eq!(with([3; 4], [120, 72, 17, 17]), None);
        assert_eq!(with([3; 4], [120, 72, 16, 16]), Some(NOT_SUPPORTED));
        assert_eq!(with([3; 4], [120, 72, 0, 0]), Some(NOT_SUPPORTED));
        assert_eq!(with([3, 2, 3, 3], [120, 72, 18, 18]), Some(INVALID_VALUE));
        assert_eq!(with([0; 4], [120, 72, 18, 18]), Some(INVALID_VALUE));
        // -1 as an i32.
        assert_eq!(with([0xffff_ffff; 4], [120, 72, 18, 18]), Some(INVALID_VALUE));
        assert_eq!(with([3; 4], [-120, 72, 18, 18]), Some(INVALID_VALUE));
        // Batches between the columns of the others.
        let d = Layout { batch: 3, stride: 5, ..layout(R_32F, 5, 3, 15) };
        let all =
            |d: Layout| [Layout { batch: 3, stride: 120, ..layouts()[0] }, Layout { batch: 3, ..layouts()[1] }, d, d];
        assert_eq!(Shape::new(DESC, all(d)).err(), None);
        assert_eq!(Shape::new(DESC, all(Layout { ld: 14, ..d })).err(), Some(NOT_SUPPORTED));
    }

    #[test]
    fn an_algorithm_wants_what_it_was_promised_and_gets_no_less() {
        let shape = Shape::new(DESC, layouts()).unwrap();
        let algo = |alignments, workspace| heuristic(&shape, &Preference { workspace, alignments }).unwrap();
        // Columns of D are 24 bytes apart.
        assert_eq!(algo([256; 4], 0).alignments, [16, 16, 8, 8]);
        assert_eq!(algo([2, 8, 4, 4], 0).alignments, [2, 8, 4, 4]);
        // So are batches that lie at odd places.
        let mut batched = layouts();
        batched.iter_mut().for_each(|layout| (layout.batch, layout.stride) = (2, 18));
        let shape_of_two = Shape::new(DESC, batched).unwrap();
        let wide = heuristic(&shape_of_two, &Preference { workspace: 0, alignments: [256; 4] }).unwrap();
        assert_eq!(wide.alignments, [4, 4, 8, 8]);
        let (wide, workspace) = (algo([256; 4], 1 << 20), 4 * 5 * 3);
        assert_eq!(wide.workspace, workspace);
        let check = |addresses, workspace| check(&shape, &wide, addresses, workspace);
        assert_eq!(check([0x100, 0x200, 0x308, 0x308], (0x400, 1 << 20)), Ok((0x400, workspace)));
        assert_eq!(check([0x108, 0x200, 0x308, 0x308], (0x400, 1 << 20)), Err(NOT_SUPPORTED));
        assert_eq!(check([0x100, 0x200, 0x304, 0x304], (0x400, 1 << 20)), Err(NOT_SUPPORTED));
        assert_eq!(check([0x100, 0x200, 0x308, 0x308], (0x400, workspace - 1)), Err(INVALID_VALUE));
        assert_eq!(check([0x100, 0x200, 0x308, 0x308], (0x480, 1 << 20)), Err(INVALID_VALUE));
    }
}
