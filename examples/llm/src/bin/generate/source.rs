//! Where a model comes from: a path, or the Hugging Face hub.

use std::borrow::Cow;
use std::ffi::OsStr;
#[cfg(feature = "hub")]
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use outcore::{Error, ErrorKind, Result};
#[cfg(any(feature = "hub", test))]
use outcore_llm::BESIDE;

/// A model's name without the folders it is in, which are private.
pub fn name(model: &OsStr) -> Cow<'_, str> {
    Path::new(model).file_name().unwrap_or(model).to_string_lossy()
}

/// The model's path; fetched first if `name` is `hf:owner/repo[:file]`.
pub fn resolve(name: &OsStr) -> Result<PathBuf> {
    // Names of a hub are ASCII; paths are whatever the file system has.
    match name.to_string_lossy().strip_prefix("hf:") {
        Some(repo) => fetch(repo),
        None => Ok(PathBuf::from(name)),
    }
}

#[cfg(not(feature = "hub"))]
fn fetch(repo: &str) -> Result<PathBuf> {
    Err(Error::new(
        ErrorKind::Unsupported,
        format!("hf:{repo} cannot be fetched: this program was built without the hub"),
    )
    .remedy("build with the feature `hub`, or download the model and give its path"))
}

#[cfg(feature = "hub")]
fn fetch(name: &str) -> Result<PathBuf> {
    use hf_hub::api::sync::{ApiBuilder, ApiError};

    let failed = |what: String, cause: ApiError| {
        let error = Error::new(ErrorKind::Io, what).caused_by(cause);
        error.remedy("check the name and the network; HF_ENDPOINT names another hub, HF_TOKEN opens gated models")
    };
    let Name { repo, file } = Name::parse(name)?;
    let mut builder = ApiBuilder::from_env().with_progress(std::io::stderr().is_terminal());
    // hf-hub itself looks only for the file that a login leaves.
    if let Ok(token) = std::env::var("HF_TOKEN") {
        builder = builder.with_token(Some(token));
    }
    let api = builder.build().map_err(|e| failed("open the hub's cache".into(), e))?.model(repo.to_owned());
    let list = || -> Result<Vec<String>> {
        let info = api.info().map_err(|e| failed(format!("list the files of hf:{repo}"), e))?;
        Ok(info.siblings.into_iter().map(|sibling| sibling.rfilename).collect())
    };
    let get = |name: &str| api.get(name).map_err(|e| failed(format!("fetch {name} of hf:{repo}"), e));
    let wanted = match file {
        // A GGUF file has everything inside.
        Some(file) if !(file.ends_with(".safetensors") || file.ends_with(INDEX)) => parts(file),
        Some(file) => {
            let names = list()?;
            let shards = match index_of(file, &names) {
                Some(index) => shards_of(&index, &get(&index)?)?,
                None => Vec::new(),
            };
            with_companions(repo, file, shards, &names)?
        }
        None => {
            let names = list()?;
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            wanted(repo, &names)?
        }
    };
    let mut first = None;
    for name in wanted {
        let path = get(&name)?;
        first.get_or_insert(path);
    }
    first.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("hf:{repo} has no model files")))
}

/// A model of a hub.
#[cfg(any(feature = "hub", test))]
#[derive(Debug, PartialEq)]
struct Name<'a> {
    /// `owner/repo`.
    repo: &'a str,
    file: Option<&'a str>,
}

#[cfg(any(feature = "hub", test))]
impl<'a> Name<'a> {
    /// Takes apart what follows `hf:`. Both parts become parts of URLs and of paths in the cache, so anything with a
    /// special meaning there is refused.
    fn parse(name: &'a str) -> Result<Self> {
        let (repo, file) = match name.split_once(':') {
            Some((repo, file)) => (repo, Some(file)),
            None => (name, None),
        };
        let good =
            repo.split('/').count() == 2 && repo.split('/').chain(file.iter().flat_map(|f| f.split('/'))).all(plain);
        if !good {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("hf:{name} does not name a model"))
                .remedy("write hf:owner/repo or hf:owner/repo:file"));
        }
        Ok(Self { repo, file })
    }
}

#[cfg(any(feature = "hub", test))]
fn plain(part: &str) -> bool {
    let usual = |c: char| c.is_ascii_alphanumeric() || "-_.+ ()".contains(c);
    !part.is_empty() && part != "." && part != ".." && part.chars().all(usual)
}

#[cfg(any(feature = "hub", test))]
const INDEX: &str = ".safetensors.index.json";

/// The folder part of a name, with the slash behind it.
#[cfg(any(feature = "hub", test))]
fn folder_of(file: &str) -> &str {
    file.rfind('/').map_or("", |slash| &file[..=slash])
}

/// The index that says which other files belong to `file`: itself, or the one that a shard is listed in.
#[cfg(any(feature = "hub", test))]
fn index_of(file: &str, names: &[String]) -> Option<String> {
    if file.ends_with(INDEX) {
        return Some(file.to_owned());
    }
    let (stem, _) = file.rsplit_once("-of-")?.0.rsplit_once('-')?;
    Some(format!("{stem}{INDEX}")).filter(|index| names.contains(index))
}

/// The shards that an index names, as names of the repository.
#[cfg(any(feature = "hub", test))]
fn shards_of(index: &str, path: &std::path::Path) -> Result<Vec<String>> {
    let bytes = std::fs::read(path).map_err(|cause| {
        Error::io(format!("read {}", path.display()), cause).remedy("check the hub's cache, the folder HF_HOME names")
    })?;
    let parsed = outcore::format::safetensors::parse_index(&bytes).map_err(|error| error.context(index))?;
    match parsed.shards.iter().find(|shard| !shard.split('/').all(plain)) {
        Some(shard) => Err(Error::new(ErrorKind::Format, format!("{index} names a shard {shard:?}"))
            .remedy("download the model by other means and give its path")),
        None => Ok(parsed.shards.iter().map(|shard| format!("{}{shard}", folder_of(index))).collect()),
    }
}

/// `file`, what an index lists beside it, and what a safetensors model needs or may have in its folder.
#[cfg(any(feature = "hub", test))]
fn with_companions(repo: &str, file: &str, shards: Vec<String>, names: &[String]) -> Result<Vec<String>> {
    let folder = folder_of(file);
    let config = format!("{folder}config.json");
    if !names.contains(&config) {
        return Err(Error::new(ErrorKind::NotFound, format!("hf:{repo} has no {config}, which {file} needs"))
            .remedy("name a file of a model that has one, or download both and give the path of their folder"));
    }
    let mut wanted = vec![file.to_owned()];
    wanted.extend(if shards.is_empty() { parts(file) } else { shards });
    wanted.extend(index_of(file, names));
    wanted.extend(BESIDE.iter().map(|name| format!("{folder}{name}")).filter(|name| names.contains(name)));
    let mut seen = std::collections::HashSet::new();
    wanted.retain(|name| seen.insert(name.clone()));
    Ok(wanted)
}

/// All files of a split model of which `file` is one, the first of them first; otherwise `file` alone.
#[cfg(any(feature = "hub", test))]
fn parts(file: &str) -> Vec<String> {
    let split = || {
        let (rest, extension) = file.rsplit_once('.')?;
        let (rest, count) = rest.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let five = |digits: &str| (digits.len() == 5).then(|| digits.parse::<u32>().ok()).flatten();
        let (number, total) = (five(number)?, five(count)?);
        let named = |n| format!("{stem}-{n:05}-of-{count}.{extension}");
        (["gguf", "safetensors"].contains(&extension) && (1..=total).contains(&number))
            .then(|| (1..=total).map(named).collect())
    };
    split().unwrap_or_else(|| vec![file.to_owned()])
}

/// The files to fetch, the one to open first.
#[cfg(any(feature = "hub", test))]
fn wanted(repo: &str, names: &[&str]) -> Result<Vec<String>> {
    let with = |suffix: &str| -> Vec<String> {
        let ours = names.iter().filter(|name| name.ends_with(suffix) && !name.contains('/'));
        ours.map(|name| (*name).to_owned()).collect()
    };
    let gguf = with(".gguf");
    if let Some(first) = gguf.first() {
        let parts = parts(first);
        if gguf.iter().any(|name| !parts.contains(name)) {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("hf:{repo} has several GGUF models"))
                .remedy(format!("name one, as in hf:{repo}:{first}; there are {}", gguf.join(", "))));
        }
        return Ok(parts);
    }
    let mut wanted = with("model.safetensors.index.json");
    wanted.extend(with(".safetensors"));
    if wanted.is_empty() {
        return Err(Error::new(ErrorKind::NotFound, format!("hf:{repo} has neither GGUF nor safetensors files"))
            .remedy("name a file in a folder of the repository as hf:owner/repo:folder/file"));
    }
    wanted.extend(names.iter().filter(|name| BESIDE.contains(name)).map(|name| (*name).to_owned()));
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_with_one_gguf_file_needs_no_file_name() {
        assert_eq!(wanted("o/r", &["README.md", "m.gguf"]).unwrap(), ["m.gguf"]);
        assert_eq!(wanted("o/r", &["a.gguf", "b.gguf"]).unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(wanted("o/r", &["README.md"]).unwrap_err().kind(), ErrorKind::NotFound);
        let names = [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ];
        let wanted = wanted("o/r", &names).unwrap();
        assert_eq!(wanted[0], "model.safetensors.index.json");
        assert_eq!(wanted.len(), 5);
    }

    #[test]
    fn a_part_of_a_split_model_brings_the_others() {
        assert_eq!(parts("m-00002-of-00003.gguf")[0], "m-00001-of-00003.gguf");
        assert_eq!(parts("m-00002-of-00003.gguf").len(), 3);
        for whole in ["m.gguf", "m-00004-of-00003.gguf", "m-2-of-3.gguf", "m-00002-of-00003.bin"] {
            assert_eq!(parts(whole), [whole]);
        }
        let split = ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"];
        assert_eq!(wanted("o/r", &split).unwrap(), split);
        assert_eq!(wanted("o/r", &[split[0], split[1], "b.gguf"]).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn names_that_are_more_than_names_are_refused() {
        assert_eq!(Name::parse("o/r").unwrap(), Name { repo: "o/r", file: None });
        assert_eq!(Name::parse("o/r:d/f.gguf").unwrap(), Name { repo: "o/r", file: Some("d/f.gguf") });
        for bad in ["", "r", "/", "o/", "/r", "o/r/x", "o/r:", "../r", "o/..", "o/r:../f", "o/r:/f", "o/r?x", "o/r:a#b"]
        {
            assert_eq!(Name::parse(bad).unwrap_err().kind(), ErrorKind::InvalidArgument, "{bad}");
        }
    }
}
