//! How text is cut into words before byte-level BPE merges within each, by the name that `tokenizer.ggml.pre` gives.
//!
//! The patterns are those that llama.cpp uses for each name. Where necessary they are rewritten so that none looks
//! ahead: the `regex` crate then takes linear time for every text. `\s+(?!\S)|\s+` at the end of a pattern is `\s+`
//! here, and [`Pattern::cut`] leaves the last space of such a run to the next word.

use regex::Regex;

use crate::error::{Error, Result};

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
const LLAMA3: &str = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const QWEN2: &str = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const QWEN35: &str = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const SEED: &str = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{L}--a-z]*[\p{L}--A-Z]+|[^\r\n\p{L}\p{N}]?[\p{L}--a-z]+[\p{L}--A-Z]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{L}--a-z]*[\p{L}--A-Z]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|[^\r\n\p{L}\p{N}]?[\p{L}--a-z]+[\p{L}--A-Z]*(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"##;
// Six characters are written as numbers, since Unicode normalisation would turn them into others.
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
// The classes of these two have no spaces: llama.cpp reads every kind of space as an ASCII one before it looks at a
// class.
const DEEPSEEK_MARKS: &str = r"\s?[!-/:-~！-／：-～‘-‟、。]+";
const DEEPSEEK_CJK: &str = r"[[一-龥ࠀ-一가-퟿]--\s]+";
const DIGIT: &str = r"\p{N}";
const DIGITS: &str = r"\p{N}+";

/// What a name stands for.
#[derive(Clone, Copy)]
pub(super) struct Pre {
    patterns: &'static [&'static str],
    /// A word that is a token stays whole, whatever its merges would make of it.
    pub(super) whole_words: bool,
    /// Texts begin with the begin token unless the file says otherwise.
    pub(super) add_bos: bool,
}

const fn pre(patterns: &'static [&'static str]) -> Pre {
    Pre { patterns, whole_words: false, add_bos: false }
}

const fn whole_words(patterns: &'static [&'static str]) -> Pre {
    Pre { patterns, whole_words: true, add_bos: true }
}

/// Every name, with what it stands for. Those of models that this crate cannot run are left out.
const NAMES: [(&[&str], Pre); 16] = [
    (
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        pre(&[DIGIT, GPT2]),
    ),
    (
        &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "exaone4",
            "trillion",
            "granite-docling",
        ],
        pre(&[GPT2]),
    ),
    (
        &["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        whole_words(&[LLAMA3]),
    ),
    (&["smaug-bpe", "dbrx", "chatglm-bpe"], pre(&[LLAMA3])),
    (&["glm4"], Pre { patterns: &[LLAMA3], whole_words: true, add_bos: false }),
    (&["minicpm5"], Pre { patterns: &[r"\p{N}{1,3}", LLAMA3], whole_words: true, add_bos: false }),
    (&["qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open"], pre(&[QWEN2])),
    (&["qwen35"], pre(&[QWEN35])),
    (&["seed-coder"], pre(&[SEED])),
    (&["tekken"], whole_words(&[TEKKEN])),
    (&["gpt-4o", "llama4", "kanana2"], pre(&[GPT4O])),
    (&["deepseek-llm"], pre(&[r"[\r\n]", DEEPSEEK_LETTERS, DEEPSEEK_MARKS, r"\s+$", DEEPSEEK_CJK, DIGITS])),
    (&["deepseek-coder"], pre(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, DIGIT])),
    (&["deepseek-v3", "hunyuan-dense"], pre(&[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3])),
    (&["falcon"], pre(&[r"[\p{P}$+<=>\^~|`]+", GPT2, "[0-9][0-9][0-9]"])),
    (&["default"], pre(&[r"[\p{P}$+<=>\^~|]+", GPT2, DIGITS, "[0-9][0-9][0-9]"])),
];

impl Pre {
    /// What `name` stands for; the error lists what is supported.
    pub(super) fn named(name: &str) -> Result<Self> {
        let found = NAMES.iter().find(|(names, _)| names.contains(&name));
        found.map(|(_, pre)| *pre).ok_or_else(|| {
            let all: Vec<&str> = NAMES.iter().flat_map(|(names, _)| names.iter().copied()).collect();
            Error::Unsupported(format!(
                "tokenizer pre-processing {name:?} is not supported, and ids would be wrong without it; supported are {}",
                all.join(", ")
            ))
        })
    }

    pub(super) fn words(self) -> Result<Words> {
        Ok(Words(self.patterns.iter().map(|pattern| Pattern::new(pattern)).collect::<Result<_>>()?))
    }
}

/// Cuts text into words: each pattern cuts what the one before has left.
#[derive(Debug)]
pub(super) struct Words(Vec<Pattern>);

impl Words {
    /// `None` if there are more than `most`.
    pub(super) fn cut<'t>(&self, text: &'t str, most: usize) -> Option<Vec<&'t str>> {
        let mut words = vec![text];
        for pattern in &self.0 {
            let mut finer = Vec::with_capacity(words.len());
            words.iter().all(|word| pattern.cut(word, &mut finer, most)).then_some(())?;
            words = finer;
        }
        Some(words)
    }
}

#[derive(Debug)]
struct Pattern {
    regex: Regex,
    /// The pattern ends in `\s+`, for what was `\s+(?!\S)|\s+`.
    gives_back: bool,
    /// Another part of the pattern takes spaces that end in a newline, and gives none back.
    lines: bool,
}

impl Pattern {
    fn new(pattern: &str) -> Result<Self> {
        // llama.cpp's tables are those of Unicode 15.1, so a letter that was added later is not a letter to it. This
        // also keeps the ids the same when the tables of the `regex` crate change.
        let dated = ["L", "M", "N", "P", "S"].iter().fold(pattern.to_owned(), |dated, class| {
            dated.replace(&format!(r"\p{{{class}}}"), &format!(r"[\p{{{class}}}&&\p{{age:15.1}}]"))
        });
        Ok(Self {
            regex: Regex::new(&dated).map_err(|e| Error::format("tokenizer pattern", e))?,
            gives_back: pattern.ends_with(r"|\s+"),
            lines: pattern.contains(r"|\s*[\r\n]+|"),
        })
    }

    /// The matches are words, and so are the parts between them. Returns whether there are at most `most`.
    fn cut<'t>(&self, text: &'t str, words: &mut Vec<&'t str>, most: usize) -> bool {
        let mut from = 0;
        while words.len() <= most
            && let Some(found) = self.regex.find_at(text, from)
        {
            let word = found.as_str();
            let mut end = found.end();
            if self.gives_back && end < text.len() && !(self.lines && word.ends_with(['\r', '\n'])) {
                // A run of spaces before a word leaves its last space to the word, if it has more than one.
                let last = word.char_indices().next_back().map_or(0, |(at, _)| at);
                if last > 0 && word.chars().all(char::is_whitespace) {
                    end = found.start() + last;
                }
            }
            words.extend([&text[from..found.start()], &text[found.start()..end]].into_iter().filter(|w| !w.is_empty()));
            from = end;
        }
        words.extend(Some(&text[from..]).filter(|w| !w.is_empty()));
        words.len() <= most
    }
}
