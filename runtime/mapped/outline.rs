//! What the headers of a model's files tell before anything is used: which files belong together, in which order a pass
//! is likely to use them, and where experts lie.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use outcore::format::{self, ModelHeader, TensorHeader};
use outcore::format::{Role, role};
use outcore::os::descriptors::undisturbed;

use crate::experts::Experts;
use crate::order;
use crate::remembered::Identity;
use crate::row::Row;

/// Indexes of a folder that are looked at.
const INDEXES_MAX: usize = 16;
/// The largest index that is looked at for a reason, in bytes.
const INDEX_MAX: u64 = 16 << 20;

/// A model in one file or in several; a file of any other kind is alone, and nothing is told of it.
#[derive(Debug)]
pub struct Outline {
    /// The files as they were when their headers were read.
    pub files: Vec<Identity>,
    /// Their pages.
    pub row: Row,
    /// The bytes that a pass is likely to use, in order: each in a file.
    pub order: Vec<(usize, Range<u64>)>,
    /// The experts of all files. Each byte is counted from the first page of the row.
    pub experts: Experts,
    /// Why a file is alone that is named as a part of a model, or by an index that cannot be used.
    pub alone: Option<String>,
    tensors: Vec<TensorHeader>,
}

impl Outline {
    /// Of the model that has this file, in the state that was found, and the file's number in it. Pages have `page`
    /// bytes.
    pub fn of(path: &Path, found: Identity, page: u64) -> (Self, usize) {
        let is_part = is_part(path);
        let header = match format::open(path) {
            Ok(header) => header,
            Err(error) => return (Self::alone(found, page, is_part.then(|| error.to_string())), 0),
        };
        let mut unusable = None;
        if let (1, format::Metadata::Safetensors(_)) = (header.files.len(), &header.metadata) {
            for index in indexes(path) {
                match format::open(&index) {
                    Ok(header) => match Self::together(header, found, page) {
                        Ok(Some(whole)) => return whole,
                        Ok(None) => {}
                        Err(why) => unusable = Some(why),
                    },
                    Err(error) if has_name(&index, path) => unusable = Some(error.to_string()),
                    Err(_) => {}
                }
            }
        }
        let (mut outline, number, why) = match Self::together(header, found, page) {
            Ok(Some((whole, number))) => (whole, number, None),
            Ok(None) => (Self::alone(found, page, None), 0, Some("it changed while its header was read".to_owned())),
            Err(why) => (Self::alone(found, page, None), 0, Some(why)),
        };
        if outline.files.len() == 1 {
            let unnamed = || is_part.then(|| "no index in its folder names it".to_owned());
            outline.alone = unusable.or(why.filter(|_| is_part)).or_else(unnamed);
        }
        (outline, number)
    }

    /// `None` if the file is none of the header's.
    ///
    /// # Errors
    /// Why the header's files are no model, although this one is of them: one has changed since the header was read, or
    /// is there twice.
    fn together(header: ModelHeader, found: Identity, page: u64) -> Result<Option<(Self, usize)>, String> {
        let name = |at: usize| header.files[at].path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_found = |file: &format::ModelFile| fs::metadata(&file.path).is_ok_and(|now| Identity::of(&now) == found);
        let Some(number) = header.files.iter().position(is_found) else { return Ok(None) };
        let mut files: Vec<Identity> = Vec::with_capacity(header.files.len());
        for (at, file) in header.files.iter().enumerate() {
            let now = fs::metadata(&file.path).ok().filter(|now| file.had_state(now));
            let now = now.ok_or_else(|| format!("{} changed while the headers were read", name(at)))?;
            files.push(Identity::of(&now));
        }
        // A file that is named twice is two files to the header, and would have to be mapped twice.
        for (at, file) in files.iter().enumerate() {
            if let Some(before) = files[..at].iter().position(|other| other == file) {
                return Err(format!("{} and {} are the same file", name(before), name(at)));
            }
        }
        let row = Row::of(files.iter().map(|file| file.len.div_ceil(page)));
        let row = row.ok_or_else(|| "its files have more pages than there are numbers".to_owned())?;
        let tensors = header.tensors;
        // A model whose output is its embedding uses that as a matrix, after the last layer.
        let has_output = tensors.iter().any(|tensor| role(&tensor.name) == Role::Output);
        let order = order::of(&tensors, has_output);
        let in_row = |tensor: &TensorHeader| {
            let start = u64::from(row.first(tensor.file as usize)) * page;
            TensorHeader { offset: start + tensor.offset, ..tensor.clone() }
        };
        let of_experts = |tensor: &&TensorHeader| matches!(role(&tensor.name), Role::Layer { expert: Some(_), .. });
        let in_row: Vec<TensorHeader> = tensors.iter().filter(of_experts).map(in_row).collect();
        let experts = Experts::of(in_row.iter());
        Ok(Some((Self { files, row, order, experts, alone: None, tensors }, number)))
    }

    /// Of a file that has no others, and of whose use nothing is known.
    fn alone(file: Identity, page: u64, alone: Option<String>) -> Self {
        // A file of more pages than there are numbers cannot be opened.
        let row = Row::of([file.len.div_ceil(page)]).unwrap_or_default();
        let (order, tensors) = (Vec::new(), Vec::new());
        Self { files: vec![file], row, order, experts: Experts::default(), alone, tensors }
    }

    /// The same files, of whose use nothing is known.
    pub fn without_order(&self) -> Self {
        Self {
            files: self.files.clone(),
            row: self.row.clone(),
            order: Vec::new(),
            experts: Experts::default(),
            alone: self.alone.clone(),
            tensors: self.tensors.clone(),
        }
    }

    /// The tensors of a file.
    pub fn tensors(&self, file: usize) -> Vec<&TensorHeader> {
        self.tensors.iter().filter(|tensor| tensor.file as usize == file).collect()
    }
}

/// The indexes of safetensors models beside a file, which may be one of their shards whatever its name is.
fn indexes(path: &Path) -> Vec<PathBuf> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let is_index = |path: &PathBuf| path.to_string_lossy().ends_with(".safetensors.index.json");
    undisturbed(|| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        entries.filter(is_index).take(INDEXES_MAX).collect()
    })
}

/// Whether an index that cannot be used has the file's name in it.
fn has_name(index: &Path, path: &Path) -> bool {
    let is_small = fs::metadata(index).is_ok_and(|index| index.len() <= INDEX_MAX);
    let Some(name) = path.file_name().and_then(|name| name.to_str()).filter(|_| is_small) else { return false };
    undisturbed(|| fs::read_to_string(index).is_ok_and(|text| text.contains(&format!("\"{name}\""))))
}

/// Whether the file's name is that of a part of a model (`name-00001-of-00004.gguf`).
fn is_part(path: &Path) -> bool {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let digits = |text: &str| text.len() >= 4 && text.bytes().all(|byte| byte.is_ascii_digit());
    let Some((before, count)) = name.rsplit_once("-of-") else { return false };
    let has_number = before.rsplit_once('-').is_some_and(|(_, number)| digits(number));
    has_number && digits(count) && count.parse() != Ok(1_u64)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::is_part;

    #[test]
    fn parts_are_known_by_their_names() {
        for name in ["a-00001-of-00004.gguf", "x/model-00002-of-00003.safetensors", "a-b-0001-of-2000.gguf"] {
            assert!(is_part(Path::new(name)), "{name}");
        }
        for name in ["model.gguf", "a-of-b.gguf", "best-of-00002.gguf", "a-1-of-2.gguf", "a-00001-of-00001.gguf", ""] {
            assert!(!is_part(Path::new(name)), "{name}");
        }
    }
}
