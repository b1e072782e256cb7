//! Where a model comes from: a path, or the Hugging Face hub.

use std::path::PathBuf;

use outcore::{Error, ErrorKind, Result};

/// The model's path; fetched first if `name` is `hf:owner/repo[:file]`.
pub fn resolve(name: &str) -> Result<PathBuf> {
    match name.strip_prefix("hf:") {
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
fn fetch(repo: &str) -> Result<PathBuf> {
    use hf_hub::api::sync::ApiBuilder;

    let failed = |what: String, cause: hf_hub::api::sync::ApiError| {
        Error::new(ErrorKind::Io, what).caused_by(cause).remedy(
            "check the name and the network; HF_ENDPOINT names another hub, HF_TOKEN is used where it is needed",
        )
    };
    let (repo, file) = match repo.split_once(':') {
        Some((repo, file)) => (repo, Some(file)),
        None => (repo, None),
    };
    if repo.split('/').filter(|part| !part.is_empty()).count() != 2 {
        return Err(Error::new(ErrorKind::InvalidArgument, format!("hf:{repo} does not name a model"))
            .remedy("write hf:owner/repo or hf:owner/repo:file"));
    }
    let api = ApiBuilder::from_env().build().map_err(|e| failed("open the hub's cache".into(), e))?;
    let api = api.model(repo.to_owned());
    if let Some(file) = file {
        return api.get(file).map_err(|e| failed(format!("fetch {file} of hf:{repo}"), e));
    }
    let info = api.info().map_err(|e| failed(format!("list the files of hf:{repo}"), e))?;
    let names: Vec<&str> = info.siblings.iter().map(|sibling| sibling.rfilename.as_str()).collect();
    let wanted = wanted(repo, &names)?;
    let mut first = None;
    for name in wanted {
        let path = api.get(name).map_err(|e| failed(format!("fetch {name} of hf:{repo}"), e))?;
        first.get_or_insert(path);
    }
    first.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("hf:{repo} has no model files")))
}

/// The files to fetch, the one to open first.
#[cfg(any(feature = "hub", test))]
fn wanted<'a>(repo: &str, names: &[&'a str]) -> Result<Vec<&'a str>> {
    let with = |suffix: &str| -> Vec<&'a str> {
        names.iter().copied().filter(|name| name.ends_with(suffix) && !name.contains('/')).collect()
    };
    let gguf = with(".gguf");
    match gguf[..] {
        [] => {}
        [only] => return Ok(vec![only]),
        _ => {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("hf:{repo} has several GGUF files"))
                .remedy(format!("name one: {}", gguf.join(", "))));
        }
    }
    let mut wanted = with("model.safetensors.index.json");
    wanted.extend(with(".safetensors"));
    if wanted.is_empty() {
        return Err(Error::new(ErrorKind::NotFound, format!("hf:{repo} has neither GGUF nor safetensors files")));
    }
    let beside =
        ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"];
    wanted.extend(names.iter().copied().filter(|name| beside.contains(name)));
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
}
