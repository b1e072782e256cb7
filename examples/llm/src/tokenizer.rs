//! Text to token ids and back: byte-level BPE, SentencePiece-like BPE, `tokenizer.json`.
//!
//! Vocabularies of GGUF files are used as llama.cpp uses them, so that ids equal its ids: special tokens are taken out
//! of the text first, the longest first wherever they stand; what is left is cut into words by the name in
//! `tokenizer.ggml.pre` (byte-level BPE only), and pieces are merged. `tokenizer.json` is the `tokenizers` crate's.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use outcore::format::gguf;
use serde_json::Value;
use tokenizers::Tokenizer as HfTokenizer;

use crate::error::{Error, Result};
use crate::files::{ModelFiles, read_json};

mod merge;
mod strings;
mod words;

use merge::{Score, merge};
use strings::{Index, Keep, Strings};
use words::{Pre, Words};

/// Tokens that end a text or a turn, by their names: those by which llama.cpp stops.
const ENDS: [&str; 26] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    END_OF_MESSAGE,
    CHANNELS[0],
    CHANNELS[1],
    "<end_of_turn>",
    "<end_of_utterance>",
    "</s>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// Ends a turn, but where there are the tokens of [`CHANNELS`]: a turn has several messages there.
const END_OF_MESSAGE: &str = "<|end|>";
const CHANNELS: [&str; 2] = ["<|return|>", "<|call|>"];

/// Tokens that frame a text to be filled in, by their names. Like those above they are control tokens, even where a
/// file does not say so.
const FILLS: [&str; 24] = [
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<fim-prefix>",
    "<fim-suffix>",
    "<fim-middle>",
    "<fim_prefix>",
    "<fim_suffix>",
    "<fim_middle>",
    "<\u{ff5c}fim\u{2581}begin\u{ff5c}>",
    "<\u{ff5c}fim\u{2581}hole\u{ff5c}>",
    "<\u{ff5c}fim\u{2581}end\u{ff5c}>",
    "<PRE>",
    "<SUF>",
    "<MID>",
    "\u{2581}<PRE>",
    "\u{2581}<SUF>",
    "\u{2581}<MID>",
    "<|code_prefix|>",
    "<|code_suffix|>",
    "<|code_middle|>",
    "<|prefix|>",
    "<|suffix|>",
    "<|middle|>",
];

/// How GGUF marks the kinds of its tokens (`tokenizer.ggml.token_type`).
mod token_type {
    pub const NORMAL: u64 = 1;
    pub const UNKNOWN: u64 = 2;
    pub const CONTROL: u64 = 3;
    pub const USER_DEFINED: u64 = 4;
    pub const BYTE: u64 = 6;
}

/// A model's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    encoder: Encoder,
    /// Token texts, by id.
    tokens: Arc<Index>,
    bos: Option<u32>,
    add_bos: bool,
    /// A whole text ends with the end token.
    add_eos: bool,
    decoder: Decoder,
}

/// The half of a [`Tokenizer`] that turns ids into text. It is all that is needed once the prompt is encoded, and takes
/// a small part of the memory.
#[derive(Debug)]
pub struct Decoder {
    /// Bytes each token stands for, by id; empty for control tokens.
    bytes: Strings,
    eos: Vec<u32>,
    strip_first_space: bool,
}

#[derive(Debug)]
enum Encoder {
    /// `tokenizer.json`; its post-processor adds the begin token.
    Hf(Box<HfTokenizer>),
    Bpe(Specials, Box<Bpe>),
    Spm(Specials, Box<Spm>),
}

impl Tokenizer {
    /// The tokenizer of a GGUF file, or the `tokenizer.json` beside safetensors files.
    pub fn load(files: &ModelFiles) -> Result<Self> {
        match files.gguf() {
            Some(metadata) => Self::from_gguf(metadata).map_err(|error| {
                let path = files.paths().first().map(|path| path.display().to_string()).unwrap_or_default();
                let instead = "the model's tokenizer cannot be used; prompts can be given as token ids";
                Error::Unsupported(format!("{path}: {error} ({instead})"))
            }),
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
        let tokens = Arc::new(Index::new(tokens.into_iter().filter_map(gguf::Value::as_str), Keep::Last));
        let kinds =
            list("token_type").map(|all| all.into_iter().map(|kind| kind.as_u64().unwrap_or(token_type::NORMAL)));
        let mut types: Vec<u64> = kinds.into_iter().flatten().collect();
        types.resize(tokens.len(), token_type::NORMAL);
        let (mut bos, mut eos) = (id("bos_token_id"), Vec::new());
        eos.extend(["eos_token_id", "eot_token_id", "eom_token_id"].into_iter().filter_map(id));
        for ((text, kind), id) in tokens.texts().zip(&mut types).zip(0..) {
            let end = ENDS.contains(&text);
            if end || FILLS.contains(&text) {
                *kind = token_type::CONTROL;
            }
            eos.extend(end.then_some(id));
        }

        let kind = meta.get_str(&key("model")).ok_or_else(|| bad("its model is not named"))?;
        let spm = match kind {
            "gpt2" => false,
            "llama" => true,
            other => {
                return Err(Error::Unsupported(format!(
                    "tokenizer model {other:?} is not supported; supported are gpt2 (byte-level BPE) and llama (SPM)"
                )));
            }
        };
        let name = meta.get_str("general.name").unwrap_or_default().to_lowercase();
        let specials = Specials::new(&tokens, &types, name.contains("phi-3") || name.contains("phi3"));
        let add_space = spm && meta.get_bool(&key("add_space_prefix")).unwrap_or(true);
        let (encoder, add_bos) = if spm {
            let scores = list("scores").ok_or_else(|| bad("scores are missing"))?;
            let scores: Vec<f32> = scores.into_iter().map(|s| s.as_f64().unwrap_or(0.0) as f32).collect();
            bos = bos.or(Some(1));
            if eos.is_empty() {
                eos.push(2);
            }
            let unknown = id("unknown_token_id").unwrap_or(0);
            (Encoder::Spm(specials, Box::new(Spm::new(tokens.clone(), scores, add_space, unknown))), true)
        } else {
            let merges = texts("merges").ok_or_else(|| bad("merges are missing"))?;
            let merges = merges.into_iter().filter_map(gguf::Value::as_str);
            let pre = match meta.get_str(&key("pre")) {
                None | Some("") => {
                    tracing::warn!("the file names no tokenizer pre-processing; ids may be wrong with the default one");
                    "default"
                }
                Some(pre) => pre,
            };
            let pre = Pre::named(pre)?;
            (Encoder::Bpe(specials, Box::new(Bpe::new(tokens.clone(), merges, pre)?)), pre.add_bos)
        };
        only_ends_of_turns(&mut eos, |name| tokens.texts().zip(0..).find(|(text, _)| *text == name).map(|(_, id)| id));
        dedup(&mut eos);
        let table = byte_table();
        let bytes =
            tokens.texts().zip(&types).map(|(t, kind)| gguf_bytes(t, *kind, (!spm).then_some(&table))).collect();
        Ok(Self {
            encoder,
            tokens,
            bos,
            add_bos: meta.get_bool(&key("add_bos_token")).unwrap_or(add_bos),
            add_eos: meta.get_bool(&key("add_eos_token")).unwrap_or(false),
            decoder: Decoder { bytes, eos, strip_first_space: add_space },
        })
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
                None if byte_token(&text).is_some() => gguf_bytes(&text, token_type::BYTE, None),
                None => gguf_bytes(&text, token_type::NORMAL, None),
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
        only_ends_of_turns(&mut eos, special);
        dedup(&mut eos);
        Ok(Self {
            bos: ids(files.metadata().get("bos_token_id")).first().copied(),
            encoder: Encoder::Hf(Box::new(inner)),
            tokens: Arc::new(Index::new(tokens.iter().map(String::as_str), Keep::Last)),
            add_bos: false,
            add_eos: false,
            decoder: Decoder { bytes: bytes.iter().collect(), eos, strip_first_space: decoder.contains("Strip") },
        })
    }

    /// The ids of `text`, in which the names of special tokens stand for them. `whole` says that it is a whole text,
    /// which begins with the model's begin token (and ends with its end token) where the model wants one.
    ///
    /// # Errors
    /// [`Invalid`](Error::Invalid) for a text of 4 GiB or more.
    pub fn encode(&self, text: &str, whole: bool) -> Result<Vec<u32>> {
        Ok(self.encode_at_most(text, whole, usize::MAX)?.unwrap_or_default())
    }

    /// As [`encode`](Self::encode), and `None` if there are more than `most`. A text that is much too long takes no
    /// longer, and no more memory, than one that is a little too long; except by the tokenizer of a `tokenizer.json`.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_at_most(&self, text: &str, whole: bool, most: usize) -> Result<Option<Vec<u32>>> {
        if u32::try_from(text.len()).is_err() {
            return Err(Error::Invalid(format!("a text of {} bytes, and fewer than 4 GiB can be encoded", text.len())));
        }
        let mut ids = Vec::new();
        if whole && self.add_bos {
            ids.extend(self.bos);
        }
        let complete = match &self.encoder {
            Encoder::Hf(inner) => {
                let encoding = inner.encode_fast(text, whole);
                ids.extend_from_slice(encoding.map_err(|e| Error::format("text", e))?.get_ids());
                true
            }
            Encoder::Bpe(specials, bpe) => specials.cut(text, &mut ids, most, |text, ids| bpe.encode(text, ids, most)),
            Encoder::Spm(specials, spm) => specials.cut(text, &mut ids, most, |text, ids| spm.encode(text, ids, most)),
        };
        if whole && self.add_eos {
            ids.extend(self.decoder.eos.first());
        }
        Ok(Some(ids).filter(|ids| complete && ids.len() <= most))
    }

    /// The ids of a rendered chat prompt. Where the model wants a begin token, there is one, whether or not the
    /// template has written it.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_chat(&self, prompt: &str) -> Result<Vec<u32>> {
        Ok(self.encode_chat_at_most(prompt, usize::MAX)?.unwrap_or_default())
    }

    /// As [`encode_chat`](Self::encode_chat), and `None` if there are more than `most`, as
    /// [`encode_at_most`](Self::encode_at_most).
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_chat_at_most(&self, prompt: &str, most: usize) -> Result<Option<Vec<u32>>> {
        let bos = self.bos.filter(|_| self.add_bos);
        let written = bos.and_then(|id| self.token(id)).is_some_and(|text| prompt.starts_with(text));
        let Some(mut ids) = self.encode_at_most(prompt, false, most)? else { return Ok(None) };
        if let Some(bos) = bos.filter(|_| !written) {
            ids.insert(0, bos);
        }
        Ok(Some(ids).filter(|ids| ids.len() <= most))
    }

    /// The longest text that may have as few tokens as this, in bytes; but for the names of special tokens.
    pub fn longest_text(&self, tokens: usize) -> usize {
        let all = &self.decoder.bytes;
        let longest = (0..all.len()).filter_map(|id| Some(all.get(id)?.len())).max().unwrap_or(0);
        longest.max(1).saturating_mul(tokens)
    }

    /// Bytes of memory that encoding takes for each byte of a text, at most.
    pub fn encoding_bytes(&self) -> usize {
        match self.encoder {
            // By the sizes of what it keeps of each word; not measured.
            Encoder::Hf(_) => 256,
            Encoder::Bpe(..) | Encoder::Spm(..) => merge::BYTES_A_BYTE + 8,
        }
    }

    /// Keeps only what is needed to decode.
    pub fn into_decoder(self) -> Decoder {
        self.decoder
    }

    /// As [`Decoder::decode`].
    pub fn decode(&self, ids: &[u32]) -> String {
        self.decoder.decode(ids)
    }

    /// As [`Decoder::stream`].
    pub fn stream(&self) -> TextStream<'_> {
        self.decoder.stream()
    }

    /// The text by which the vocabulary lists token `id`.
    pub fn token(&self, id: u32) -> Option<&str> {
        self.tokens.text(id)
    }

    /// As [`Decoder::push`].
    pub fn push(&self, unfinished: &mut Unfinished, id: u32) -> String {
        self.decoder.push(unfinished, id)
    }

    /// The bytes that token `id` stands for: none for control tokens, and not always whole characters.
    pub fn bytes(&self, id: u32) -> &[u8] {
        self.decoder.bytes.get(id as usize).unwrap_or_default()
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The tokens that end a text or a turn.
    pub fn eos(&self) -> &[u32] {
        &self.decoder.eos
    }

    /// As [`Decoder::is_end`].
    pub fn is_end(&self, id: u32) -> bool {
        self.decoder.is_end(id)
    }

    /// Number of tokens.
    pub fn vocab(&self) -> usize {
        self.tokens.len()
    }
}

impl Decoder {
    /// The text of `ids`, without control tokens; bytes that are no valid UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut stream = self.stream();
        let mut text: String = ids.iter().map(|id| stream.push(*id)).collect();
        text.push_str(&stream.finish());
        text
    }

    /// Decodes tokens one by one.
    pub fn stream(&self) -> TextStream<'_> {
        let unfinished = Unfinished { pending: Vec::new(), strip: self.strip_first_space };
        TextStream { decoder: self, unfinished }
    }

    /// The text that `id` completes behind what is unfinished; empty in the middle of a character.
    pub fn push(&self, unfinished: &mut Unfinished, id: u32) -> String {
        let bytes = self.bytes.get(id as usize).unwrap_or_default();
        let skip = usize::from(std::mem::take(&mut unfinished.strip) && bytes.first() == Some(&b' '));
        let pending = &mut unfinished.pending;
        pending.extend_from_slice(&bytes[skip..]);
        let mut text = String::new();
        loop {
            match std::str::from_utf8(pending) {
                Ok(valid) => {
                    text.push_str(valid);
                    pending.clear();
                    return text;
                }
                Err(error) => {
                    let (valid, rest) = pending.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    let Some(bad) = error.error_len() else {
                        *pending = rest.to_vec();
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    *pending = rest[bad..].to_vec();
                }
            }
        }
    }

    /// Whether `id` ends a text or a turn.
    pub fn is_end(&self, id: u32) -> bool {
        self.eos.contains(&id)
    }
}

/// What is left of a text that grows by tokens: a character that is not whole.
#[derive(Clone, Debug, Default)]
pub struct Unfinished {
    pending: Vec<u8>,
    /// Whether the first space is no part of the text.
    strip: bool,
}

impl Unfinished {
    /// What is left at the end: nothing, or U+FFFD for an unfinished character.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// Text that grows by tokens; a character split over several tokens appears when it is complete.
#[derive(Debug)]
pub struct TextStream<'a> {
    decoder: &'a Decoder,
    unfinished: Unfinished,
}

impl TextStream<'_> {
    /// The text that `id` completes; empty in the middle of a character.
    pub fn push(&mut self, id: u32) -> String {
        self.decoder.push(&mut self.unfinished, id)
    }

    /// As [`Unfinished::finish`].
    pub fn finish(self) -> String {
        self.unfinished.finish()
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

/// Takes the end of a message away from the ends of a turn, where a turn has several. `id_of` finds control tokens.
fn only_ends_of_turns(ids: &mut Vec<u32>, id_of: impl Fn(&str) -> Option<u32>) {
    if CHANNELS.into_iter().all(|name| id_of(name).is_some()) {
        let message = id_of(END_OF_MESSAGE);
        ids.retain(|id| Some(*id) != message);
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

/// The bytes that a token of a GGUF file stands for; byte-level BPE writes them by `table`.
fn gguf_bytes(text: &str, kind: u64, table: Option<&HashMap<char, u8>>) -> Vec<u8> {
    match (kind, byte_token(text), table) {
        (token_type::NORMAL, _, Some(table)) => bpe_bytes(text, table),
        (token_type::NORMAL, _, None) => text.replace('\u{2581}', " ").into_bytes(),
        (token_type::USER_DEFINED, ..) => text.as_bytes().to_vec(),
        (token_type::BYTE, Some(byte), _) => vec![byte],
        _ => Vec::new(),
    }
}

/// The tokens that stand for themselves wherever their names occur in a text.
#[derive(Debug)]
struct Specials(Vec<Special>);

#[derive(Debug)]
struct Special {
    text: String,
    id: u32,
    /// White space after it is dropped.
    strips: bool,
}

enum Part<'t> {
    Text(&'t str),
    Token(u32),
}

impl Specials {
    /// `strips`: the vocabulary is Phi-3's, most of whose special tokens drop the white space after them.
    fn new(tokens: &Index, types: &[u64], strips: bool) -> Self {
        let special = |kind| matches!(kind, token_type::UNKNOWN | token_type::CONTROL | token_type::USER_DEFINED);
        let chosen = tokens.texts().zip(types).zip(0..).filter(|((text, kind), _)| special(**kind) && !text.is_empty());
        let mut all: Vec<Special> = chosen
            .map(|((text, _), id)| {
                let strips = strips && !["<unk>", "<s>", "<|endoftext|>"].contains(&text);
                Special { text: text.to_owned(), id, strips }
            })
            .collect();
        all.sort_by_key(|special| Reverse(special.text.len()));
        Self(all)
    }

    /// Cuts `text` at special tokens; `plain` turns what lies between into ids. Returns false if there are more than
    /// `most`: then some are missing.
    fn cut(&self, text: &str, ids: &mut Vec<u32>, most: usize, plain: impl Fn(&str, &mut Vec<u32>) -> bool) -> bool {
        let mut parts = Vec::from_iter((!text.is_empty()).then_some(Part::Text(text)));
        for special in &self.0 {
            // Most special tokens are in few texts, so a new list is made only for a hit.
            if !text.contains(&special.text) {
                continue;
            }
            let mut finer = Vec::with_capacity(parts.len() + 2);
            for part in parts {
                match part {
                    Part::Text(text) => special.cut(text, &mut finer, most),
                    token @ Part::Token(_) => finer.push(token),
                }
                if finer.len() > most {
                    return false;
                }
            }
            parts = finer;
        }
        parts.into_iter().all(|part| match part {
            Part::Text(text) => plain(text, ids),
            Part::Token(id) => {
                ids.push(id);
                true
            }
        })
    }
}

impl Special {
    /// Ends early if there are more than `most`.
    fn cut<'t>(&self, mut text: &'t str, parts: &mut Vec<Part<'t>>, most: usize) {
        while parts.len() <= most
            && let Some((before, after)) = text.split_once(&self.text)
        {
            parts.extend((!before.is_empty()).then_some(Part::Text(before)));
            parts.push(Part::Token(self.id));
            let space = |c: char| matches!(c, ' ' | '\t'..='\r');
            text = if self.strips { after.trim_start_matches(space) } else { after };
        }
        parts.extend((!text.is_empty()).then_some(Part::Text(text)));
    }
}

/// Byte-level BPE: within each word, merges the neighbours that come first in the list of merges.
#[derive(Debug)]
struct Bpe {
    ids: Arc<Index>,
    /// The list of merges: two pieces with a space between. Pieces hold no spaces.
    ranks: Index,
    words: Words,
    whole_words: bool,
    /// How each byte is written.
    letters: [char; 256],
    /// The tokens that are one ASCII character.
    ascii: [Option<u32>; 128],
    /// Bytes of the longest token.
    longest: usize,
}

impl Bpe {
    fn new<'a>(ids: Arc<Index>, merges: impl Iterator<Item = &'a str>, pre: Pre) -> Result<Self> {
        let ranks = Index::new(merges, Keep::First);
        let mut letters = ['\0'; 256];
        byte_table().into_iter().for_each(|(letter, byte)| letters[usize::from(byte)] = letter);
        let ascii = std::array::from_fn(|c| ids.number(std::str::from_utf8(&[c as u8]).ok()?));
        // A letter stands for a byte.
        let longest = ids.texts().map(|text| text.chars().count()).max().unwrap_or(0).max(1);
        Ok(Self { ids, ranks, words: pre.words()?, whole_words: pre.whole_words, letters, ascii, longest })
    }

    /// Returns false if there are more than `most`: then some are missing.
    fn encode(&self, text: &str, ids: &mut Vec<u32>, most: usize) -> bool {
        let Some(words) = self.words.cut(text, most) else { return false };
        for word in words {
            if ids.len() + word.len() / self.longest > most {
                return false;
            }
            let word: String = word.bytes().map(|b| self.letters[usize::from(b)]).collect();
            if let Some(id) = self.ids.number(&word).filter(|_| self.whole_words) {
                ids.push(id);
                continue;
            }
            let rate = |both: &str, second: usize| {
                let (left, right) = both.split_at(second);
                self.ranks.number(&format!("{left} {right}")).map(Reverse)
            };
            for piece in merge(&word, rate) {
                match self.ids.number(piece) {
                    Some(id) => ids.push(id),
                    // A piece that is not a token falls apart into the bytes of its text. Most of these are not tokens
                    // either.
                    None => ids.extend(piece.bytes().filter_map(|b| self.ascii.get(usize::from(b)).copied().flatten())),
                }
            }
        }
        true
    }
}

/// SentencePiece-like BPE: merges the neighbours whose joined text has the best score, leftmost first.
#[derive(Debug)]
struct Spm {
    ids: Arc<Index>,
    scores: Vec<f32>,
    bytes: [u32; 256],
    add_space: bool,
    /// Bytes of the longest token.
    longest: usize,
}

impl Spm {
    fn new(ids: Arc<Index>, scores: Vec<f32>, add_space: bool, unknown: u32) -> Self {
        let bytes = std::array::from_fn(|byte| {
            let alone = || char::from_u32(byte as u32).filter(char::is_ascii).map(String::from);
            let named = ids.number(&format!("<0x{byte:02X}>"));
            named.or_else(|| ids.number(&alone()?)).unwrap_or(unknown)
        });
        let longest = ids.texts().map(str::len).max().unwrap_or(0).max(1);
        Self { ids, scores, bytes, add_space, longest }
    }

    /// Returns false if there are more than `most`: then some are missing.
    fn encode(&self, text: &str, ids: &mut Vec<u32>, most: usize) -> bool {
        // A space is a letter of three bytes.
        if ids.len() + text.len() / self.longest > most {
            return false;
        }
        let mut escaped = text.replace(' ', "\u{2581}");
        if self.add_space {
            escaped.insert(0, '\u{2581}');
        }
        let rate = |both: &str, _| {
            let id = self.ids.number(both)? as usize;
            Some(Score(self.scores.get(id).copied().unwrap_or(0.0)))
        };
        for piece in merge(&escaped, rate) {
            match self.ids.number(piece) {
                Some(id) => ids.push(id),
                None => ids.extend(piece.bytes().map(|b| self.bytes[usize::from(b)])),
            }
        }
        true
    }
}
