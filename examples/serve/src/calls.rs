//! Calls of tools in the text of an answer: how models write them, how they are found, and the grammar of one.
//!
//! A model writes calls as its chat template shows them, so the form follows from the template. Forms:
//! <https://github.com/NousResearch/Hermes-Function-Calling>,
//! <https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/>,
//! <https://docs.mistral.ai/capabilities/function_calling/>.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::mem::take;
use std::sync::Arc;

use outcore_llm::{ChatTemplate, Tokenizer};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::call::Call;
use crate::channels::{self, Channels};
use crate::error::ApiError;
use crate::grammar::{check, too_complex, with_options};

/// How a model writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, anywhere: Hermes, Qwen.
    Tagged,
    /// `[TOOL_CALLS]` and all of them, at the end: Mistral.
    Listed,
    /// The answer is `{"name": ..., "parameters": ...}`: Llama 3.
    Bare,
    /// In messages of their own: gpt-oss. [`Channels`] finds them.
    Channels,
}

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const LIST: &str = "[TOOL_CALLS]";
/// May stand before bare calls.
const PYTHON: &str = "<|python_tag|>";

/// What a piece of text adds to an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Text that is no call.
    pub text: String,
    /// Calls that are whole.
    pub calls: Vec<Call>,
}

impl Form {
    /// That of a model's template, if it is known.
    pub fn of(template: &ChatTemplate) -> Option<Self> {
        if Channels::are_of(template) {
            return Some(Self::Channels);
        }
        let forms = [(OPEN, Self::Tagged), (LIST, Self::Listed), ("\"parameters\"", Self::Bare)];
        forms.into_iter().find(|(text, _)| template.mentions(text)).map(|(_, form)| form)
    }

    /// Control tokens that say something here, by their names: they have no text.
    fn spoken(self) -> &'static [&'static str] {
        match self {
            Self::Tagged => &[OPEN, CLOSE],
            Self::Listed => &[LIST],
            Self::Bare | Self::Channels => &[],
        }
    }

    fn arguments(self) -> &'static str {
        match self {
            Self::Tagged | Self::Listed | Self::Channels => "arguments",
            Self::Bare => "parameters",
        }
    }
}

/// The members of an object.
type Members<'a> = BTreeMap<String, &'a RawValue>;

/// A call from its members; `None` if they are not those of one.
fn call(members: &Members<'_>) -> Option<Call> {
    let name: String = serde_json::from_str(members.get("name")?.get()).ok()?;
    let arguments = members.get("arguments").or_else(|| members.get("parameters"));
    let text = arguments.map_or("{}", |value| value.get());
    // Some models put the object into a string.
    let arguments = serde_json::from_str(text).unwrap_or_else(|_| text.to_owned());
    serde_json::from_str::<Members<'_>>(&arguments).ok()?;
    (!name.is_empty()).then_some(Call { name, arguments })
}

/// The calls in a text that has nothing else: objects, with semicolons between them or in an array.
fn calls(text: &str) -> Option<Vec<Call>> {
    if let Ok(all) = serde_json::from_str::<Vec<Members<'_>>>(text) {
        return all.iter().map(call).collect();
    }
    let mut rest = text.trim();
    let mut found = Vec::new();
    while !rest.is_empty() {
        let mut objects = serde_json::Deserializer::from_str(rest).into_iter::<Members<'_>>();
        found.push(call(&objects.next()?.ok()?)?);
        let end = objects.byte_offset();
        rest = rest.get(end..)?.trim_start_matches(|c: char| c == ';' || c.is_whitespace());
    }
    Some(found).filter(|found| !found.is_empty())
}

/// The calls behind `[TOOL_CALLS]`: an array, or for newer models a name and an object, and the same again.
fn listed(text: &str) -> Option<Vec<Call>> {
    let named = |part: &str| {
        let (name, _) = part.split_once(['[', '{'])?;
        let arguments = part.get(part.find('{')?..)?.trim();
        serde_json::from_str::<Members<'_>>(arguments).ok()?;
        let name = name.trim();
        (!name.is_empty()).then(|| Call { name: name.to_owned(), arguments: arguments.to_owned() })
    };
    calls(text).or_else(|| text.split(LIST).map(named).collect())
}

/// Looks for calls in text that comes in pieces.
#[derive(Debug)]
pub struct Finder {
    form: Form,
    /// The names of the tools.
    names: Arc<[String]>,
    /// Text that may be a call, or the beginning of one.
    held: String,
    state: State,
    found: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Bare calls: nothing has come but white space.
    Begin,
    Text,
    Call,
}

impl Finder {
    /// Looks for calls of this form.
    pub fn new(form: Form, names: Arc<[String]>) -> Self {
        let state = if form == Form::Bare { State::Begin } else { State::Text };
        Self { form, names, held: String::new(), state, found: 0 }
    }

    /// How many calls were found.
    pub fn found(&self) -> usize {
        self.found
    }

    /// The text of a control token that says something in calls: its name. Others have none.
    pub fn spoken(&self, tokenizer: &Tokenizer, id: u32) -> &'static str {
        if !tokenizer.bytes(id).is_empty() {
            return "";
        }
        let name = tokenizer.token(id);
        self.form.spoken().iter().find(|spoken| name == Some(spoken)).copied().unwrap_or_default()
    }

    /// Adds a piece.
    pub fn push(&mut self, piece: &str) -> Found {
        self.held.push_str(piece);
        let mut found = Found::default();
        while self.step(&mut found) {}
        self.found += found.calls.len();
        found
    }

    /// Goes on as far as it is known. Returns whether it may be known further.
    fn step(&mut self, found: &mut Found) -> bool {
        match (self.state, self.form) {
            (State::Begin, _) => {
                let begun = self.held.trim_start();
                let is_call = begun.starts_with('{') || begun.starts_with(PYTHON);
                if begun.is_empty() || (!is_call && PYTHON.starts_with(begun)) {
                    return false;
                }
                self.state = if is_call { State::Call } else { State::Text };
                true
            }
            (State::Text, Form::Bare) => {
                found.text += &take(&mut self.held);
                false
            }
            (State::Text, form) => {
                let mark = if form == Form::Tagged { OPEN } else { LIST };
                let at = self.held.find(mark);
                // White space before a call is no part of the text.
                let end = at.unwrap_or(self.held.len() - begun(&self.held, mark));
                let end = self.held[..end].trim_end().len();
                let rest = self.held.split_off(end);
                found.text += &std::mem::replace(&mut self.held, rest);
                if at.is_some() {
                    self.held = self.held.trim_start()[mark.len()..].to_owned();
                    self.state = State::Call;
                }
                at.is_some()
            }
            (State::Call, Form::Tagged) => {
                let Some(end) = self.held.find(CLOSE) else { return false };
                let rest = self.held.split_off(end + CLOSE.len());
                let whole = std::mem::replace(&mut self.held, rest);
                match calls(&whole[..end]) {
                    Some(calls) => found.calls.extend(calls),
                    None => found.text += &format!("{OPEN}{whole}"),
                }
                self.state = State::Text;
                true
            }
            // All of it is looked at when no more comes.
            (State::Call, _) => false,
        }
    }

    /// What was held back, when no more comes.
    pub fn finish(&mut self) -> Found {
        let held = take(&mut self.held);
        let mut found = Found::default();
        match (self.state, self.form) {
            (State::Call, Form::Bare) => {
                let known = |all: &Vec<Call>| all.iter().all(|call| self.names.contains(&call.name));
                match calls(held.trim_start().trim_start_matches(PYTHON)).filter(known) {
                    Some(calls) => found.calls = calls,
                    None => found.text = held,
                }
            }
            (State::Call, Form::Tagged) => match calls(&held) {
                Some(calls) => found.calls = calls,
                None => found.text = format!("{OPEN}{held}"),
            },
            (State::Call, Form::Listed) => match listed(&held) {
                Some(calls) => found.calls = calls,
                None => found.text = format!("{LIST}{held}"),
            },
            _ if self.found > 0 && held.trim().is_empty() => {}
            _ => found.text = held,
        }
        self.found += found.calls.len();
        found
    }
}

/// The bytes of the longest end of `text` that is a beginning of `mark`, but not all of it.
fn begun(text: &str, mark: &str) -> usize {
    let longest = text.len().min(mark.len() - 1);
    (1..=longest).rev().find(|len| text.ends_with(&mark[..*len])).unwrap_or(0)
}

/// A text as part of a rule: the control token of that name, if there is one.
fn literal(tokenizer: &Tokenizer, text: &str) -> String {
    match tokenizer.encode(text, false).as_deref() {
        Ok([id]) if tokenizer.bytes(*id).is_empty() => format!("<[{id}]>"),
        _ => Value::from(text).to_string(),
    }
}

/// The schema of a tool's arguments.
fn parameters(nth: usize, tool: &Value) -> Result<Map<String, Value>, ApiError> {
    let parameters = tool.pointer("/function/parameters");
    let schema = match parameters {
        None | Some(Value::Null) => json!({ "properties": {}, "additionalProperties": false }),
        Some(schema) => schema.clone(),
    };
    let param = format!("tools[{nth}].function.parameters");
    let wrong = || {
        let message = format!("Invalid value for '{param}': it has to describe an object.");
        ApiError::invalid(message).param(param.clone()).code("invalid_value")
    };
    let Value::Object(mut schema) = schema else { return Err(wrong()) };
    if schema.entry("type").or_insert_with(|| "object".into()) != "object" {
        return Err(wrong());
    }
    Ok(schema)
}

/// The grammar of one call, as `llguidance` reads it: of one of `tools`, a JSON array of definitions, or of the one
/// with the name `only`.
///
/// # Errors
/// 400 for a tool whose parameters are no object.
pub fn rules(form: Form, tools: &str, only: Option<&str>, tokenizer: &Tokenizer) -> Result<String, ApiError> {
    let tools: Vec<Value> = serde_json::from_str(tools).unwrap_or_default();
    let mut alternatives = Vec::new();
    let mut rules = String::new();
    for (nth, tool) in tools.iter().enumerate() {
        let name = tool.pointer("/function/name").and_then(Value::as_str).unwrap_or_default();
        if only.is_some_and(|only| only != name) {
            continue;
        }
        let schema = with_options(parameters(nth, tool)?);
        check(&schema).map_err(|why| too_complex("tools", &why))?;
        let call = match form {
            Form::Channels => channels::call_rule(tokenizer, name, &format!("arguments_{nth}")),
            _ => {
                let begin = Value::from(format!("{{\"name\": \"{name}\", \"{}\": ", form.arguments()));
                format!("{begin} arguments_{nth} \"}}\"")
            }
        };
        // Writing to a string does not fail.
        let _ = writeln!(rules, "call_{nth}: {call}\narguments_{nth}: %json {schema}");
        alternatives.push(format!("call_{nth}"));
    }
    let [open, close, list] = [OPEN, CLOSE, LIST].map(|text| literal(tokenizer, text));
    let start = match form {
        Form::Tagged => format!(r#"{open} "\n" call "\n" {close}"#),
        Form::Listed => format!(r#"{list} "[" call "]""#),
        Form::Bare | Form::Channels => "call".to_owned(),
    };
    Ok(format!("start: {start}\ncall: {}\n{rules}", alternatives.join(" | ")))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    /// What is found in a text, whatever the pieces that it comes in.
    #[track_caller]
    fn found(form: Form, text: &str) -> (String, Vec<(String, String)>) {
        let in_pieces = |cuts: &[usize]| {
            let mut finder = Finder::new(form, ["f".into(), "g".into()].into());
            let mut all = Found::default();
            let mut begin = 0;
            for end in cuts.iter().copied().chain([text.len()]) {
                let more = finder.push(&text[begin..end]);
                all.text += &more.text;
                all.calls.extend(more.calls);
                begin = end;
            }
            let more = finder.finish();
            all.text += &more.text;
            all.calls.extend(more.calls);
            assert_eq!(finder.found(), all.calls.len());
            all
        };
        let whole = in_pieces(&[]);
        for at in (0..=text.len()).filter(|at| text.is_char_boundary(*at)) {
            assert_eq!(in_pieces(&[at]), whole, "{text:?} at {at}");
        }
        let each: Vec<usize> = (1..text.len()).filter(|at| text.is_char_boundary(*at)).collect();
        assert_eq!(in_pieces(&each), whole, "{text:?}");
        (whole.text, whole.calls.into_iter().map(|call| (call.name, call.arguments)).collect())
    }

    fn some(text: &str, calls: &[(&str, &str)]) -> (String, Vec<(String, String)>) {
        (text.into(), calls.iter().map(|(name, arguments)| ((*name).into(), (*arguments).into())).collect())
    }

    #[test]
    fn tagged_calls_are_found_between_text() {
        let one = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"z\": 1, \"a\": \"\u{fc}\"}}\n</tool_call>";
        let arguments = "{\"z\": 1, \"a\": \"\u{fc}\"}";
        assert_eq!(found(Form::Tagged, one), some("", &[("f", arguments)]));
        let text = format!("I call <it>:\n\n{one}\n{one}\n");
        assert_eq!(found(Form::Tagged, &text), some("I call <it>:", &[("f", arguments), ("f", arguments)]));
        assert_eq!(found(Form::Tagged, &format!("{one} done")), some(" done", &[("f", arguments)]));
        let unended = one.strip_suffix("\n</tool_call>").unwrap();
        assert_eq!(found(Form::Tagged, unended), some("", &[("f", arguments)]));
        let broken = [
            "<tool_call>{\"name\": \"f\"",
            "<tool_call>{\"arguments\": {}}</tool_call>",
            "<tool_call>[1]</tool_call> a",
            "<tool_call>{\"name\": \"f\", \"arguments\": 1}</tool_call>",
            "<tool_ca",
            " a  ",
        ];
        broken.iter().for_each(|text| assert_eq!(found(Form::Tagged, text), some(text, &[])));
        let in_a_string = r#"<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>"#;
        assert_eq!(found(Form::Tagged, in_a_string), some("", &[("f", "{\"a\": 1}")]));
        assert_eq!(found(Form::Tagged, "<tool_call>{\"name\": \"f\"}</tool_call>"), some("", &[("f", "{}")]));
    }

    #[test]
    fn listed_calls_are_found_at_the_end() {
        let two = r#"a [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]"#;
        assert_eq!(found(Form::Listed, two), some("a", &[("f", "{\"a\": 1}"), ("g", "{}")]));
        let newer = r#"[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}"#;
        assert_eq!(found(Form::Listed, newer), some("", &[("f", "{\"a\": 1}"), ("g", "{}")]));
        for broken in ["[TOOL_CALLS]", "[TOOL_CALLS] f", "[TOOL_CALLS][{\"name\": 1}]", "[TOOL_"] {
            assert_eq!(found(Form::Listed, broken), some(broken, &[]));
        }
    }

    #[test]
    fn bare_calls_are_whole_answers_that_name_a_tool() {
        let one = r#"{"name": "f", "parameters": {"a": 1}}"#;
        assert_eq!(found(Form::Bare, one), some("", &[("f", "{\"a\": 1}")]));
        let two = format!("\n<|python_tag|>{one}; {one}");
        assert_eq!(found(Form::Bare, &two), some("", &[("f", "{\"a\": 1}"), ("f", "{\"a\": 1}")]));
        for text in [r#"{"name": "other", "parameters": {}}"#, "{\"a\": 1}", "{", "so: {\"name\": \"f\"}", "<|pyt", " "]
        {
            assert_eq!(found(Form::Bare, text), some(text, &[]));
        }
    }
}
