//! The pages of several files as one row of numbers.

use std::ops::Range;

use outcore::Tensor;
use parking_lot::RwLock;

/// How files lie in the row. Behind each file one number is left out, so that pages whose numbers follow one another
/// lie in one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// The number of each file's first page.
    firsts: Vec<u32>,
    end: u32,
}

impl Row {
    /// Of files with so many pages each. `None` if there are more pages than numbers.
    pub fn of(pages: impl IntoIterator<Item = u64>) -> Option<Self> {
        let (mut firsts, mut end) = (Vec::new(), 0_u32);
        for pages in pages {
            firsts.push(end);
            end = end.checked_add(u32::try_from(pages).ok()?)?.checked_add(1)?;
        }
        Some(Self { firsts, end })
    }

    /// How many files there are.
    pub fn files(&self) -> usize {
        self.firsts.len()
    }

    /// Numbers in the row, those that are left out included.
    pub fn len(&self) -> u32 {
        self.end
    }

    /// The number of the first page of a file.
    pub fn first(&self, file: usize) -> u32 {
        self.firsts.get(file).copied().unwrap_or(self.end)
    }

    /// The file of a number, and which of its pages it is.
    pub fn place(&self, number: u32) -> (usize, u32) {
        let file = self.firsts.partition_point(|first| *first <= number).saturating_sub(1);
        (file, number - self.first(file))
    }

    /// Whether this number is left out, or lies behind all files: no page has it.
    pub fn is_left_out(&self, number: u32) -> bool {
        !self.of_file(self.place(number).0).contains(&number)
    }

    /// The numbers of a file's pages.
    pub fn of_file(&self, file: usize) -> Range<u32> {
        self.first(file)..self.first(file + 1).saturating_sub(1).max(self.first(file))
    }
}

/// The files of a row that are mapped now.
#[derive(Debug)]
pub struct Members {
    row: Row,
    page: u64,
    mapped: RwLock<Vec<Option<Tensor>>>,
}

impl Members {
    /// Of a row of files with pages of `page` bytes, none of which is mapped yet.
    pub fn new(row: Row, page: u64) -> Self {
        let mapped = RwLock::new(vec![None; row.files()]);
        Self { row, page, mapped }
    }

    pub fn row(&self) -> &Row {
        &self.row
    }

    pub fn page(&self) -> u64 {
        self.page
    }

    /// A file is mapped. Returns whether it was not before; if it was, nothing changes.
    pub fn join(&self, file: usize, bytes: &Tensor) -> bool {
        let mut mapped = self.mapped.write();
        let free = mapped.get_mut(file).filter(|place| place.is_none());
        free.map(|place| *place = Some(bytes.clone())).is_some()
    }

    /// A file is mapped no more.
    pub fn leave(&self, file: usize) {
        if let Some(place) = self.mapped.write().get_mut(file) {
            *place = None;
        }
    }

    /// The bytes of these pages, as few ranges, each in a file that is mapped.
    pub fn ranges(&self, pages: &[u32]) -> Vec<(usize, Range<u64>)> {
        let of_run = |run: &[u32]| {
            let ((file, first), bytes) = (self.row.place(*run.first()?), self.run(*run.first()?..run.last()? + 1)?);
            let start = u64::from(first) * self.page;
            Some((file, start..start + bytes.size().get()))
        };
        pages.chunk_by(|a, b| a.checked_add(1) == Some(*b)).filter_map(of_run).collect()
    }

    /// How many files are mapped.
    pub fn count(&self) -> usize {
        self.mapped.read().iter().flatten().count()
    }

    /// The bytes of the files that are mapped, with the files' numbers.
    pub fn mapped(&self) -> Vec<(usize, Tensor)> {
        let mapped = self.mapped.read();
        mapped.iter().enumerate().filter_map(|(file, bytes)| Some((file, bytes.clone()?))).collect()
    }

    /// Some bytes of a file; `None` if it is not mapped, or has no such bytes.
    pub fn bytes(&self, file: usize, range: Range<u64>) -> Option<Tensor> {
        self.mapped.read().get(file)?.as_ref()?.rows(range).ok()
    }

    /// Pages that follow one another, up to the end of their file; `None` if that is not mapped.
    pub fn run(&self, pages: Range<u32>) -> Option<Tensor> {
        let (file, first) = self.row.place(pages.start);
        let mapped = self.mapped.read();
        let bytes = mapped.get(file)?.as_ref()?;
        let start = u64::from(first) * self.page;
        let end = (start + u64::from(pages.end.saturating_sub(pages.start)) * self.page).min(bytes.size().get());
        if start < end { bytes.rows(start..end).ok() } else { None }
    }

    /// Pages in this order, as few tensors. Those of files that are not mapped are left out.
    pub fn runs(&self, pages: &[u32]) -> Vec<Tensor> {
        let runs = pages.chunk_by(|a, b| a.checked_add(1) == Some(*b));
        runs.filter_map(|run| self.run(*run.first()?..run.last()?.checked_add(1)?)).collect()
    }

    /// The address of a page; `None` if its file is not mapped.
    pub fn address(&self, page: u32) -> Option<u64> {
        let (file, index) = self.row.place(page);
        Some(self.mapped.read().get(file)?.as_ref()?.address() + u64::from(index) * self.page)
    }

    /// The pages that hold some bytes of a file.
    pub fn pages(&self, file: usize, bytes: &Range<u64>) -> Range<u32> {
        let (first, all) = (self.row.first(file), self.row.of_file(file));
        let number = |page: u64| u32::try_from(page).ok().and_then(|page| first.checked_add(page)).unwrap_or(all.end);
        number(bytes.start / self.page).min(all.end)..number(bytes.end.div_ceil(self.page)).min(all.end)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::Row;

    #[test]
    fn pages_of_two_files_never_follow_one_another() {
        let row = Row::of([3, 1, 0, 2]).unwrap();
        assert_eq!([0, 1, 2, 3].map(|file| row.of_file(file)), [0..3, 4..5, 6..6, 7..9]);
        assert_eq!([0, 2, 4, 7, 8].map(|number| row.place(number)), [(0, 0), (0, 2), (1, 0), (3, 0), (3, 1)]);
        assert_eq!((row.files(), row.len()), (4, 10));
        // The number behind a file is no page of the next one.
        assert_eq!(row.place(3), (0, 3));
        assert_eq!((0..12).filter(|number| row.is_left_out(*number)).collect::<Vec<_>>(), [3, 5, 6, 9, 10, 11]);
        assert_eq!(Row::of([u64::from(u32::MAX)]), None);
        assert_eq!(Row::of([1 << 31, 1 << 31]), None);
    }
}
