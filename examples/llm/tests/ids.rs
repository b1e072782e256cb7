//! Token ids equal llama.cpp's. `ids/*.json` holds those that `benches/compare/ids.py` got from llama-cpp-python
//! 0.3.36. OUTCORE_IDS names another folder that ids.py has filled, with more random texts.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};

use outcore_llm::{ChatTemplate, Error, Message, ModelFiles, Tokenizer};
use serde_json::Value;

fn folder() -> PathBuf {
    match std::env::var_os("OUTCORE_IDS") {
        Some(folder) => folder.into(),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/ids"),
    }
}

fn fixture(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(folder().join(name)).unwrap()).unwrap()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    list(value).iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Compares with one group of a fixture, and says how many texts there were.
fn compare(tokenizer: &Tokenizer, fixture: &Value, group: &Value, who: &str) -> usize {
    let whole = fixture["whole"].as_str().unwrap();
    assert_eq!(tokenizer.encode(whole, true).unwrap(), ids(&group["whole"]), "{who}: {whole:?} as a whole text");
    let (texts, wanted) = (list(&fixture["texts"]), list(&group["ids"]));
    assert_eq!(texts.len(), wanted.len());
    let mut wrong = 0;
    for (text, wanted) in texts.iter().map(|t| t.as_str().unwrap()).zip(wanted) {
        let (ours, wanted) = (tokenizer.encode(text, false).unwrap(), ids(wanted));
        for most in [0, ours.len() / 2, ours.len().saturating_sub(1), ours.len(), ours.len() + 1] {
            let some = tokenizer.encode_at_most(text, false, most).unwrap();
            assert_eq!(some, Some(&ours).filter(|ids| ids.len() <= most).cloned(), "{who}: {text:?}, at most {most}");
        }
        if ours != wanted {
            wrong += 1;
            let at = ours.iter().zip(&wanted).take_while(|(a, b)| a == b).count();
            eprintln!("{who}: {text:?} differs from id {at} on\n  ours {ours:?}\n  want {wanted:?}");
        }
    }
    assert_eq!(wrong, 0, "{who}: texts of {} whose ids differ", texts.len());
    texts.len()
}

/// A copy of the GGUF file `from` that names another pre-processing.
fn with_pre(from: &Path, pre: &str, to: &Path) {
    let bytes = std::fs::read(from).unwrap();
    let key = b"tokenizer.ggml.pre";
    let at = bytes.windows(key.len()).position(|w| w == key).unwrap() + key.len() + 4;
    let len = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let changed = [&bytes[..at], &(pre.len() as u64).to_le_bytes(), pre.as_bytes(), &bytes[at + 8 + len..]];
    std::fs::write(to, changed.concat()).unwrap();
}

#[test]
fn the_real_models_ids_are_llama_cpps() {
    let fixture = fixture("smollm2.json");
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models").join(fixture["model"].as_str().unwrap());
    if !model.is_file() {
        eprintln!("SKIPPED: {} is absent; scripts/fetch_model.sh gets it", model.display());
        return;
    }
    let files = ModelFiles::open(model).unwrap();
    let tokenizer = Tokenizer::load(&files).unwrap();
    println!("{} texts", compare(&tokenizer, &fixture, &fixture["groups"][0], "smollm2"));

    let template = ChatTemplate::load(&files, &tokenizer).unwrap().unwrap();
    for chat in list(&fixture["chats"]) {
        let turn = |t: &Value| Message::new(t[0].as_str().unwrap(), t[1].as_str().unwrap());
        let turns: Vec<Message> = list(&chat[0]).iter().map(turn).collect();
        let prompt = template.render(&turns, true).unwrap();
        assert_eq!(prompt, chat[1].as_str().unwrap(), "{turns:?}");
        assert_eq!(tokenizer.encode_chat(&prompt).unwrap(), ids(&chat[2]), "{turns:?}");
    }
}

#[test]
fn ids_of_a_sentencepiece_vocabulary_are_llama_cpps() {
    let fixture = fixture("spm.json");
    let tokenizer = Tokenizer::load(&ModelFiles::open(folder().join("spm.gguf")).unwrap()).unwrap();
    println!("{} texts", compare(&tokenizer, &fixture, &fixture["groups"][0], "spm"));
}

#[test]
fn ids_under_every_pre_processing_are_llama_cpps() {
    let fixture = fixture("words.json");
    let place = tempfile::tempdir().unwrap();
    let mut compared = 0;
    for group in list(&fixture["groups"]) {
        for pre in list(&group["pre"]).iter().map(|pre| pre.as_str().unwrap()) {
            let path = place.path().join(format!("{pre}.gguf"));
            with_pre(&folder().join("words.gguf"), pre, &path);
            let tokenizer = Tokenizer::load(&ModelFiles::open(path).unwrap()).unwrap();
            compared += compare(&tokenizer, &fixture, group, pre);
        }
    }
    println!("{compared} texts");
}

#[test]
fn an_unknown_pre_processing_is_an_error_that_lists_the_known_ones() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("unknown.gguf");
    with_pre(&folder().join("words.gguf"), "of-tomorrow", &path);
    let error = Tokenizer::load(&ModelFiles::open(&path).unwrap()).unwrap_err();
    assert!(matches!(error, Error::Unsupported(_)));
    let text = error.to_string();
    assert!(text.contains("\"of-tomorrow\"") && text.contains("llama-bpe") && text.contains("qwen2"), "{text}");
    // llama.cpp treats a file without a name like one with the name "default".
    with_pre(&folder().join("words.gguf"), "", &path);
    let unnamed = Tokenizer::load(&ModelFiles::open(&path).unwrap()).unwrap();
    with_pre(&folder().join("words.gguf"), "default", &path);
    let default = Tokenizer::load(&ModelFiles::open(&path).unwrap()).unwrap();
    let text = "12345 it's  <=> x";
    assert_eq!(unnamed.encode(text, true).unwrap(), default.encode(text, true).unwrap());
}

#[test]
fn a_chat_prompt_has_one_begin_token_where_the_model_wants_one() {
    let place = tempfile::tempdir().unwrap();
    for (pre, wants) in [("llama-bpe", true), ("qwen2", false)] {
        let path = place.path().join("chat.gguf");
        with_pre(&folder().join("words.gguf"), pre, &path);
        let tokenizer = Tokenizer::load(&ModelFiles::open(&path).unwrap()).unwrap();
        let bos: Vec<u32> = tokenizer.bos().into_iter().filter(|_| wants).collect();
        let bare = tokenizer.encode("hi", false).unwrap();
        assert_eq!(tokenizer.encode_chat("hi").unwrap(), [bos, bare].concat(), "{pre}: no begin token in the prompt");
        let written = tokenizer.encode("<s>hi", false).unwrap();
        assert_eq!(tokenizer.encode_chat("<s>hi").unwrap(), written, "{pre}: a begin token in the prompt");
    }
}

#[test]
fn long_runs_are_cut_like_short_ones() {
    let tokenizer = Tokenizer::load(&ModelFiles::open(folder().join("words.gguf")).unwrap()).unwrap();
    for run in [" ", "x", "\n", "!", "9"] {
        let text = run.repeat(1 << 18) + "y";
        assert_eq!(tokenizer.decode(&tokenizer.encode(&text, false).unwrap()), text, "{run:?}");
    }
}
