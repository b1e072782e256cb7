//! Where each tensor's bytes go, and what is read for them. Pure.
//!
//! A *region* is what is read together: whole blocks of [`IO_ALIGNMENT`] bytes of one file, as O_DIRECT asks, which go
//! to pages of the kernel's that no other region has.
//!
//! - A tensor of [`SMALL`] bytes or more has a region to itself. It stays there, so its pages can go when it does. Its
//!   first and last block also have bytes of its neighbours, which are read twice.
//! - Smaller tensors that follow each other share a region, from which they are copied.

use std::ops::Range;

use crate::format::ModelHeader;
use crate::store::{CHUNK, IO_ALIGNMENT};

/// Tensors of fewer bytes are copied: a region of their own would have them take several times their size.
pub(super) const SMALL: u64 = 64 << 10;

/// Bytes that a read brings at most.
pub(super) const PIECE: u64 = CHUNK.get();

/// What is read together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Region {
    /// Place among the header's files.
    pub file: u32,
    /// First byte in that file: a multiple of [`IO_ALIGNMENT`].
    pub start: u64,
    /// Bytes: a multiple of [`IO_ALIGNMENT`].
    pub len: u64,
    /// Places among the header's tensors. Those of no bytes among them have no part in it.
    pub tensors: Range<usize>,
    /// Whether its tensors are copied. Else there is one, which stays.
    pub copied: bool,
    /// First byte in the memory of its kind: a multiple of `unit`.
    pub at: u64,
    /// Bytes of that memory: a multiple of `unit`.
    pub room: u64,
}

/// What a read brings: a part of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Place among the regions.
    pub region: usize,
    /// First byte in the region.
    pub offset: u64,
    /// Bytes of memory: a multiple of [`IO_ALIGNMENT`].
    pub len: u32,
    /// Bytes that the file has of them: fewer only at its end.
    pub valid: u32,
}

#[derive(Debug, Default)]
pub(super) struct Layout {
    /// In the order of the files.
    pub regions: Vec<Region>,
    /// In the order of the regions.
    pub pieces: Vec<Piece>,
    /// Memory of the regions that stay.
    pub kept: u64,
    /// Memory of the regions from which tensors are copied. Few have memory at a time.
    pub copied: u64,
    /// Bytes of the tensors that are copied.
    pub copies: u64,
}

impl Layout {
    /// The layout of a header that was [checked](ModelHeader::check); `unit` is the bytes of the kernel's pages, or
    /// [`IO_ALIGNMENT`] if that is more.
    pub fn of(header: &ModelHeader, unit: u64) -> Self {
        let mut regions: Vec<Region> = Vec::new();
        for (number, tensor) in header.tensors.iter().enumerate().filter(|(_, tensor)| tensor.len > 0) {
            let start = tensor.offset - tensor.offset % IO_ALIGNMENT;
            let len = (tensor.end() - start).next_multiple_of(IO_ALIGNMENT);
            let small = tensor.len < SMALL;
            if small
                && let Some(run) = regions.last_mut()
                && run.copied
                && run.file == tensor.file
                && start + len <= run.start + PIECE
            {
                // Sorted by offset: the run begins no later.
                run.len = run.len.max(start + len - run.start);
                run.tensors.end = number + 1;
                continue;
            }
            let tensors = number..number + 1;
            regions.push(Region { file: tensor.file, start, len, tensors, copied: small, at: 0, room: 0 });
        }
        let mut layout = Self { regions, ..Self::default() };
        for (number, region) in layout.regions.iter_mut().enumerate() {
            let end = if region.copied { &mut layout.copied } else { &mut layout.kept };
            (region.at, region.room) = (*end, region.len.next_multiple_of(unit));
            *end += region.room;
            let file = header.files.get(region.file as usize).map_or(0, |file| file.len);
            for offset in (0..region.len).step_by(PIECE as usize) {
                let len = (region.len - offset).min(PIECE);
                let valid = len.min(file.saturating_sub(region.start + offset));
                let (len, valid) = (len as u32, valid as u32);
                layout.pieces.push(Piece { region: number, offset, len, valid });
            }
        }
        layout.copies = header.tensors.iter().map(|tensor| tensor.len).filter(|len| *len < SMALL).sum();
        layout
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::dtype::DType;
    use crate::format::{FileState, Metadata, ModelFile, TensorHeader};

    const UNIT: u64 = IO_ALIGNMENT;

    /// Tensors of these lengths behind headers of these lengths, one file after the other.
    fn header(files: &[(u64, &[u64])]) -> ModelHeader {
        let state = FileState::of(&std::fs::metadata(".").unwrap());
        let (mut listed, mut tensors) = (Vec::new(), Vec::new());
        for (file, (at, lengths)) in (0..).zip(files) {
            let mut offset = *at;
            for (n, len) in lengths.iter().enumerate() {
                let name = format!("{file}.{n:03}");
                tensors.push(TensorHeader { name, dtype: DType::U8, shape: vec![*len], file, offset, len: *len });
                offset += len;
            }
            listed.push(ModelFile { path: PathBuf::new(), len: offset, state });
        }
        ModelHeader::new(listed, tensors, Metadata::Bytes).unwrap()
    }

    /// What every layout promises.
    fn check(header: &ModelHeader, unit: u64) -> Layout {
        let layout = Layout::of(header, unit);
        let mut ends = [0, 0];
        let mut pieces = layout.pieces.iter().peekable();
        for (number, region) in layout.regions.iter().enumerate() {
            assert!((region.start | region.len).is_multiple_of(IO_ALIGNMENT) && region.len > 0);
            assert!((region.at | region.room).is_multiple_of(unit) && region.room >= region.len);
            assert_eq!(region.at, ends[usize::from(region.copied)]);
            ends[usize::from(region.copied)] += region.room;
            assert!(region.copied || region.tensors.len() == 1);
            assert!(!region.copied || region.len <= PIECE);
            let file = &header.files[region.file as usize];
            let (mut at, mut valid) = (0, 0);
            while let Some(piece) = pieces.next_if(|piece| piece.region == number) {
                assert_eq!(piece.offset, at);
                assert!(piece.valid > 0 && piece.valid <= piece.len && u64::from(piece.len) <= PIECE);
                at += u64::from(piece.len);
                valid += u64::from(piece.valid);
            }
            assert_eq!((at, valid), (region.len, region.len.min(file.len - region.start)));
        }
        assert!(pieces.next().is_none());
        assert_eq!(ends, [layout.kept, layout.copied]);
        for (number, tensor) in header.tensors.iter().enumerate().filter(|(_, tensor)| tensor.len > 0) {
            let of = |region: &&Region| region.tensors.contains(&number);
            let region = layout.regions.iter().find(of).unwrap();
            assert!(region.file == tensor.file && region.copied == (tensor.len < SMALL));
            assert!(region.start <= tensor.offset && tensor.end() <= region.start + region.len);
        }
        layout
    }

    #[test]
    fn large_tensors_have_pages_of_their_own_and_small_ones_share_a_read() {
        let large = 3 * PIECE + 100;
        let header = header(&[(808, &[8, large, 24, 0, 4000, 16, SMALL, 4]), (72, &[12, 7])]);
        for unit in [UNIT, 64 << 10] {
            let layout = check(&header, unit);
            let kinds: Vec<_> = layout.regions.iter().map(|r| (r.file, r.copied, r.tensors.clone())).collect();
            let expected = [
                (0, true, 0..1),
                (0, false, 1..2),
                (0, true, 2..6),
                (0, false, 6..7),
                (0, true, 7..8),
                (1, true, 8..10),
            ];
            assert_eq!(kinds, expected);
            assert_eq!(layout.copies, 8 + 24 + 4000 + 16 + 4 + 12 + 7);
        }
    }

    #[test]
    fn a_run_of_small_tensors_is_no_longer_than_a_read() {
        let layout = check(&header(&[(4095, &[SMALL - 1; 100])]), UNIT);
        assert!(layout.regions.len() > 3 && layout.regions.len() < 6, "{}", layout.regions.len());
        assert_eq!((layout.kept, layout.pieces.len()), (0, layout.regions.len()));
        // What is copied may have gaps of tensors that an index leaves out.
        let mut gaps = header(&[(8, &[100; 3])]);
        for (tensor, n) in gaps.tensors.iter_mut().zip(0..) {
            tensor.offset = 8 + n * PIECE;
        }
        gaps.files[0].len = 3 * PIECE + 8;
        assert_eq!(check(&gaps, UNIT).regions.len(), 3);
    }

    #[test]
    fn nothing_takes_nothing() {
        for header in [header(&[]), header(&[(8, &[])]), header(&[(8, &[0, 0])])] {
            let layout = check(&header, UNIT);
            assert_eq!((layout.pieces.len(), layout.kept, layout.copied, layout.copies), (0, 0, 0, 0));
        }
    }
}
