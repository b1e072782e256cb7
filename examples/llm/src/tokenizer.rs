//! Text to token ids and back: byte-level BPE (by the `tokenizers` crate), SentencePiece-like BPE, `tokenizer.json`.
//!
//! Vocabularies of GGUF files are split into words by the pattern that `tokenizer.ggml.pre` names; the patterns are
//! those of llama.cpp's `llama-vocab.cpp`, so ids equal llama.cpp's. Its SentencePiece algorithm is there too
//! (`llm_tokenizer_spm`).

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

use aho_corasick::{AhoCorasick, MatchKind};
use outcore::format::gguf;
use serde_json::Value;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{AddedToken, Tokenizer as HfTokenizer};

use crate::error::{Error, Result};
use crate::files::{ModelFiles, read_json};

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEFAULT: [&str; 4] = [
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
];

/// Tokens that end a text in the models this crate runs, by their names.
const ENDS: [&str; 8] =
    ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "</s>"];

/// How GGUF marks the kinds of its tokens (`tokenizer.ggml.token_type`).
mod token_type {
    pub const CONTROL: u64 = 3;
    pub const USER_DEFINED: u64 = 4;
    pub const BYTE: u64 = 6;
}

/// A model's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    encoder: Encoder,
    /// Token texts, by id.
    tokens: Vec<String>,
    /// Bytes each token stands for, by id; empty for control tokens.
    bytes: Vec<Vec<u8>>,
    bos: Option<u32>,
    eos: Vec<u32>,
    add_bos: bool,
    strip_first_space: bool,
}

#[derive(Debug)]
enum Encoder {
    /// The `tokenizers` crate; where the flag is set, its post-processor adds the begin token.
    Hf(Box<HfTokenizer>, bool),
    Spm(Spm),
}

impl Tokenizer {
    /// The tokenizer of a GGUF file, or the `tokenizer.json` beside safetensors files.
    pub fn load(files: &ModelFiles) -> Result<Self> {
        match files.gguf() {
            Some(metadata) => Self::from_gguf(metadata),
            None => Self::from_folder(files),
        }
    }

    fn from_gguf(meta: &gguf::Metadata) -> Result<Self> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let list = |name: &str| meta.get_array(&key(name));
        let texts = |name: &str| list(name).filter(|all| all.element_type() == gguf::ValueType::Str);
        let id = |name: &str| meta.get_u32(&key(name));
        let bad = |why: &str| Error::format("GGUF tokenizer", why);

        let tokens = texts("tokens").ok_or_else(|| bad("tokens are missing"))?;
        let tokens: Vec<String> = tokens.into_iter().filter_map(gguf::Value::as_str).map(str::to_owned).collect();
        let kinds = list("token_type").map(|all| all.into_iter().map(|kind| kind.as_u64().unwrap_or(1)));
        let mut types: Vec<u64> = kinds.into_iter().flatten().collect();
        types.resize(tokens.len(), 1);
        let (bos, mut eos) = (id("bos_token_id"), Vec::new());
        eos.extend(["eos_token_id", "eot_token_id", "eom_token_id"].into_iter().filter_map(id));
        let control = |text: &str| tokens.iter().zip(&types).position(|(t, k)| t == text && *k == token_type::CONTROL);
        eos.extend(ENDS.into_iter().filter_map(control).map(|i| i as u32));
        dedup(&mut eos);

        let kind = meta.get_str(&key("model")).ok_or_else(|| bad("its model is not named"))?;
        let pre = meta.get_str(&key("pre")).unwrap_or("default");
        let spm = match kind {
            "gpt2" => false,
            "llama" => true,
            other => {
                return Err(Error::Unsupported(format!(
                    "tokenizer model {other:?} is not supported; supported are gpt2 (byte-level BPE) and llama (SPM)"
                )));
            }
        };
        let bytes = tokens.iter().zip(&types);
        let bytes = if spm {
            bytes.map(|(t, kind)| spm_bytes(t, *kind)).collect()
        } else {
            let table = byte_table();
            bytes
                .map(|(t, kind)| if *kind == token_type::CONTROL { Vec::new() } else { bpe_bytes(t, &table) })
                .collect()
        };
        let add_space = meta.get_bool(&key("add_space_prefix")).unwrap_or(spm);
        let encoder = if spm {
            let scores = list("scores").ok_or_else(|| bad("scores are missing"))?;
            let scores: Vec<f32> = scores.into_iter().map(|s| s.as_f64().unwrap_or(0.0) as f32).collect();
            let unknown = id("unknown_token_id").unwrap_or(0);
            Encoder::Spm(Spm::new(&tokens, &types, scores, add_space, unknown)?)
        } else {
            let merges = texts("merges").ok_or_else(|| bad("merges are missing"))?;
            Encoder::Hf(
                Box::new(byte_level_bpe(&tokens, &types, merges.into_iter().filter_map(gguf::Value::as_str), pre)?),
                false,
            )
        };
        let add_bos =
            meta.get_bool(&key("add_bos_token")).unwrap_or(spm || matches!(pre, "llama3" | "llama-v3" | "llama-bpe"));
        Ok(Self { encoder, tokens, bytes, bos, eos, add_bos, strip_first_space: spm && add_space })
    }

    fn from_folder(files: &ModelFiles) -> Result<Self> {
        let path = files.folder().join("tokenizer.json");
        let what = || path.display().to_string();
        let inner = HfTokenizer::from_file(&path).map_err(|e| Error::format(what(), e))?;
        let spec = Value::Object(read_json(&path)?);
        let decoder = spec.get("decoder").map(Value::to_string).unwrap_or_default();
        let byte_level = decoder.contains("ByteLevel");
        let vocab = inner.get_vocab(true);
        let len = vocab.values().copied().max().map_or(0, |v| v as usize + 1);
        if len > 1 << 28 {
            return Err(Error::format(what(), "a token id is too large"));
        }
        let (mut tokens, mut bytes) = (vec![String::new(); len], vec![Vec::new(); len]);
        let added = inner.get_added_tokens_decoder();
        let table = byte_table();
        for (text, id) in vocab {
            bytes[id as usize] = match added.get(&id) {
                Some(token) if token.special => Vec::new(),
                Some(token) => token.content.clone().into_bytes(),
                None if byte_level => bpe_bytes(&text, &table),
                None => spm_bytes(&text, if byte_token(&text).is_some() { token_type::BYTE } else { 1 }),
            };
            tokens[id as usize] = text;
        }
        let mut eos = ids(files.metadata().get("eos_token_id"));
        let generation = files.folder().join("generation_config.json");
        if generation.is_file() {
            eos.extend(ids(read_json(&generation)?.get("eos_token_id")));
        }
        let special = |name: &str| inner.token_to_id(name).filter(|id| added.get(id).is_some_and(|t| t.special));
        eos.extend(ENDS.into_iter().filter_map(special));
        dedup(&mut eos);
        Ok(Self {
            bos: ids(files.metadata().get("bos_token_id")).first().copied(),
            encoder: Encoder::Hf(Box::new(inner), true),
            tokens,
            bytes,
            eos,
            add_bos: false,
            strip_first_space: decoder.contains("Strip"),
        })
    }

    /// The ids of `text`. `whole` says that it is a whole text, which begins with the model's begin token where the
    /// model wants one; a rendered chat prompt brings its own.
    pub fn encode(&self, text: &str, whole: bool) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        if whole && self.add_bos {
            ids.extend(self.bos);
        }
        match &self.encoder {
            Encoder::Hf(inner, adds_bos) => {
                let encoding = inner.encode_fast(text, whole && *adds_bos);
                ids.extend_from_slice(encoding.map_err(|e| Error::format("text", e))?.get_ids());
            }
            Encoder::Spm(spm) => spm.encode(text, &mut ids),
        }
        Ok(ids)
    }

    /// The text of `ids`, without control tokens; bytes that are no valid UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut stream = self.stream();
        let mut text: String = ids.iter().map(|id| stream.push(*id)).collect();
        text.push_str(&stream.finish());
        text
    }

    /// Decodes tokens one by one.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream { tokenizer: self, pending: Vec::new(), strip: self.strip_first_space }
    }

    /// The text by which the vocabulary lists token `id`.
    pub fn token(&self, id: u32) -> Option<&str> {
        self.tokens.get(id as usize).map(String::as_str)
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The tokens that end a text or a turn.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Whether `id` ends a text or a turn.
    pub fn is_end(&self, id: u32) -> bool {
        self.eos.contains(&id)
    }

    /// Number of tokens.
    pub fn vocab(&self) -> usize {
        self.tokens.len()
    }
}

/// Text that grows by tokens; a character split over several tokens appears when it is complete.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    pending: Vec<u8>,
    strip: bool,
}

impl TextStream<'_> {
    /// The text that `id` completes; empty in the middle of a character.
    pub fn push(&mut self, id: u32) -> String {
        let bytes = self.tokenizer.bytes.get(id as usize).map_or(&[][..], Vec::as_slice);
        let skip = usize::from(std::mem::take(&mut self.strip) && bytes.first() == Some(&b' '));
        self.pending.extend_from_slice(&bytes[skip..]);
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.pending) {
                Ok(valid) => {
                    text.push_str(valid);
                    self.pending.clear();
                    return text;
                }
                Err(error) => {
                    let (valid, rest) = self.pending.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    let Some(bad) = error.error_len() else {
                        self.pending = rest.to_vec();
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.pending = rest[bad..].to_vec();
                }
            }
        }
    }

    /// What is left at the end: nothing, or U+FFFD for an unfinished character.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

fn ids(value: Option<&Value>) -> Vec<u32> {
    let one = |v: &Value| v.as_u64().and_then(|v| u32::try_from(v).ok());
    match value {
        Some(Value::Array(all)) => all.iter().filter_map(one).collect(),
        Some(value) => one(value).into_iter().collect(),
        None => Vec::new(),
    }
}

fn dedup(ids: &mut Vec<u32>) {
    let mut seen = HashSet::new();
    ids.retain(|id| seen.insert(*id));
}

/// The printable characters by which byte-level BPE writes bytes (GPT-2's `bytes_to_unicode`).
pub(crate) fn byte_table() -> HashMap<char, u8> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let others = (0..=255u8).filter(|b| !printable(*b)).zip(256u32..);
    let others = others.filter_map(|(b, c)| char::from_u32(c).map(|c| (c, b)));
    (0..=255u8).filter(|b| printable(*b)).map(|b| (char::from(b), b)).chain(others).collect()
}

/// The bytes a byte-level BPE token stands for; characters outside the table stand for themselves (added tokens).
fn bpe_bytes(text: &str, table: &HashMap<char, u8>) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = text.chars().map(|c| table.get(&c).copied()).collect();
    bytes.unwrap_or_else(|| text.as_bytes().to_vec())
}

/// The byte that a token like `<0x0A>` stands for.
fn byte_token(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

fn spm_bytes(text: &str, kind: u64) -> Vec<u8> {
    match (kind, byte_token(text)) {
        (token_type::CONTROL, _) => Vec::new(),
        (token_type::BYTE, Some(byte)) => vec![byte],
        _ => text.replace('\u{2581}', " ").into_bytes(),
    }
}

fn byte_level_bpe<'a>(
    tokens: &[String],
    types: &[u64],
    merges: impl Iterator<Item = &'a str>,
    pre: &str,
) -> Result<HfTokenizer> {
    let bad = |why: String| Error::format("GGUF tokenizer", why);
    let vocab: Vocab = tokens.iter().cloned().zip(0..).collect();
    let pair = |m: &str| m.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned()));
    let merges: Option<Vec<_>> = merges.map(pair).collect();
    let merges = merges.ok_or_else(|| bad("a merge is not a pair".into()))?;
    let llama3 = matches!(pre, "llama3" | "llama-v3" | "llama-bpe");
    let model = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(llama3).build();
    let mut tokenizer = HfTokenizer::new(model.map_err(|e| bad(e.to_string()))?);
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer(pre)?));
    let special = |kind: u64| {
        let chosen = tokens.iter().zip(types).filter(move |(_, k)| **k == kind);
        chosen.map(|(t, _)| AddedToken::from(t.clone(), true).normalized(false)).collect::<Vec<_>>()
    };
    tokenizer.add_special_tokens(special(token_type::CONTROL)).map_err(|e| bad(e.to_string()))?;
    tokenizer.add_special_tokens(special(token_type::USER_DEFINED)).map_err(|e| bad(e.to_string()))?;
    Ok(tokenizer)
}

/// How text is cut into words before merging.
fn pre_tokenizer(pre: &str) -> Result<PreTokenizerWrapper> {
    let patterns: &[&str] = match pre {
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" => &[r"\p{N}", GPT2],
        "gpt-2" | "mpt" | "olmo" | "jais" | "phi-2" => &[GPT2],
        "llama3" | "llama-v3" | "llama-bpe" | "smaug-bpe" => &[LLAMA3],
        "qwen2" | "deepseek-r1-qwen" => &[QWEN2],
        "default" => &DEFAULT,
        other => {
            return Err(Error::Unsupported(format!(
                "tokenizer pre-processing {other:?} is not supported; supported are smollm, starcoder, refact, \
                 command-r, codeshell, gpt-2, mpt, olmo, jais, phi-2, llama-bpe, smaug-bpe, qwen2, deepseek-r1-qwen and default"
            )));
        }
    };
    let mut steps = Vec::with_capacity(patterns.len() + 1);
    for pattern in patterns {
        let pattern = SplitPattern::Regex((*pattern).to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
        steps.push(split.map_err(|e| Error::format("tokenizer pattern", e))?.into());
    }
    steps.push(ByteLevel::new(false, true, false).into());
    Ok(Sequence::new(steps).into())
}

/// SentencePiece-like BPE: merges the neighbours whose joined text has the best score, leftmost first.
#[derive(Debug)]
struct Spm {
    ids: HashMap<String, u32>,
    scores: Vec<f32>,
    bytes: HashMap<u8, u32>,
    special: AhoCorasick,
    special_ids: Vec<u32>,
    add_space: bool,
    unknown: u32,
}

impl Spm {
    fn new(tokens: &[String], types: &[u64], scores: Vec<f32>, add_space: bool, unknown: u32) -> Result<Self> {
        let named = |kinds: &'static [u64]| {
            let chosen = tokens.iter().zip(types).zip(0u32..).filter(|((t, k), _)| kinds.contains(k) && !t.is_empty());
            chosen.map(|((t, _), id)| (t.as_str(), id))
        };
        let (special, special_ids): (Vec<&str>, Vec<u32>) =
            named(&[token_type::CONTROL, token_type::USER_DEFINED]).unzip();
        let special = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(special);
        Ok(Self {
            ids: tokens.iter().cloned().zip(0..).collect(),
            scores,
            bytes: named(&[token_type::BYTE]).filter_map(|(t, id)| byte_token(t).map(|b| (b, id))).collect(),
            special: special.map_err(|e| Error::format("GGUF tokenizer", e))?,
            special_ids,
            add_space,
            unknown,
        })
    }

    fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        let mut from = 0;
        for found in self.special.find_iter(text) {
            self.plain(&text[from..found.start()], ids);
            ids.push(self.special_ids[found.pattern()]);
            from = found.end();
        }
        self.plain(&text[from..], ids);
    }

    fn plain(&self, text: &str, ids: &mut Vec<u32>) {
        if text.is_empty() {
            return;
        }
        let mut escaped = text.replace(' ', "\u{2581}");
        if self.add_space {
            escaped.insert(0, '\u{2581}');
        }
        // Symbols are ranges of `escaped` in a linked list; a merged symbol's right half becomes empty.
        let starts: Vec<usize> = escaped.char_indices().map(|(i, _)| i).chain([escaped.len()]).collect();
        let mut symbols: Vec<(usize, usize)> = starts.windows(2).map(|w| (w[0], w[1])).collect();
        let count = symbols.len();
        let mut next: Vec<usize> = (1..=count).collect();
        let mut previous: Vec<Option<usize>> = (0..count).map(|i| i.checked_sub(1)).collect();
        let mut heap = BinaryHeap::new();
        let candidate = |left: usize, right: usize, symbols: &[(usize, usize)]| {
            let (start, end) = (symbols.get(left)?.0, symbols.get(right)?.1);
            let id = self.ids.get(&escaped[start..end])?;
            Some((Score(self.scores.get(*id as usize).copied().unwrap_or(0.0)), Reverse(left), right, end - start))
        };
        (1..count).for_each(|i| heap.extend(candidate(i - 1, i, &symbols)));
        while let Some((_, Reverse(left), right, len)) = heap.pop() {
            let ((start, middle), (second, end)) = (symbols[left], symbols[right]);
            // Stale: one of the two was merged meanwhile.
            if start == middle || second == end || middle != second || end - start != len {
                continue;
            }
            symbols[left].1 = end;
            symbols[right].0 = end;
            next[left] = next[right];
            if next[left] < count {
                previous[next[left]] = Some(left);
                heap.extend(candidate(left, next[left], &symbols));
            }
            if let Some(before) = previous[left] {
                heap.extend(candidate(before, left, &symbols));
            }
        }
        for (start, end) in symbols.into_iter().filter(|(start, end)| start < end) {
            let piece = &escaped[start..end];
            match self.ids.get(piece) {
                Some(id) => ids.push(*id),
                None => ids.extend(piece.bytes().map(|b| self.bytes.get(&b).copied().unwrap_or(self.unknown))),
            }
        }
    }
}

/// A score, ordered.
#[derive(PartialEq)]
struct Score(f32);

impl Eq for Score {}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Score {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}
