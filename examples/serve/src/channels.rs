//! Answers in channels: gpt-oss thinks in one, calls tools in another, and speaks in the last.
//!
//! An answer is a sequence of messages: `<|channel|>NAME<|message|>TEXT<|end|><|start|>assistant`, and the next one.
//! A header with `to=functions.NAME` makes the text the arguments of a call. Format:
//! <https://cookbook.openai.com/articles/openai-harmony>.

use outcore_llm::{ChatTemplate, Tokenizer};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::call::Call;

const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
/// Each of these ends a message.
const ENDS: [&str; 4] = ["<|end|>", "<|start|>", "<|return|>", "<|call|>"];
/// The channel of thoughts, and of answers.
const THOUGHTS: &str = "analysis";
const ANSWER: &str = "final";
/// Stands in front of a tool's name.
const RECIPIENT: &str = "to=functions.";

/// What a token adds to an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spoken {
    /// Text of the answer.
    pub text: String,
    /// Thoughts.
    pub thoughts: String,
    /// A call that is whole.
    pub call: Option<Call>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// In a message's header, which is held.
    Header(String),
    Thoughts,
    Answer,
    /// In the arguments of a call, which are held.
    Call(Call),
}

/// Sorts the tokens of an answer by channels.
#[derive(Debug)]
pub struct Channels {
    place: Place,
    /// Whether no message has begun or ended yet.
    is_first: bool,
    called: bool,
}

impl Default for Channels {
    /// For an answer that begins with a header.
    fn default() -> Self {
        Self { place: Place::Header(String::new()), is_first: true, called: false }
    }
}

impl Channels {
    /// Whether a model with this template writes in channels.
    pub fn are_of(template: &ChatTemplate) -> bool {
        template.mentions(CHANNEL) && template.mentions(MESSAGE)
    }

    /// Whether a call was found.
    pub fn called(&self) -> bool {
        self.called
    }

    /// Adds a token, with the text that it completes. Control tokens have none.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, text: &str) -> Spoken {
        let control = tokenizer.token(id).filter(|_| tokenizer.bytes(id).is_empty());
        self.push_one(control.unwrap_or_default(), text)
    }

    fn push_one(&mut self, control: &str, text: &str) -> Spoken {
        let mut spoken = Spoken::default();
        match &mut self.place {
            Place::Header(header) => header.push_str(text),
            Place::Thoughts => spoken.thoughts.push_str(text),
            Place::Answer => spoken.text.push_str(text),
            Place::Call(call) => call.arguments.push_str(text),
        }
        match (control, &mut self.place) {
            (MESSAGE, Place::Header(header)) => {
                self.place = begun(header);
                self.is_first = false;
            }
            (control, _) if ENDS.contains(&control) => {
                self.is_first = false;
                let held = std::mem::replace(&mut self.place, Place::Header(String::new()));
                if let Place::Call(call) = held {
                    self.end(call, &mut spoken);
                }
            }
            // Tells where names end.
            (control, Place::Header(header)) => header.push_str(control),
            _ => {}
        }
        spoken
    }

    /// What was held back, when no more comes; `rest` is the text of a character that was cut off.
    pub fn finish(&mut self, rest: &str) -> Spoken {
        let mut spoken = self.push_one("", rest);
        match std::mem::replace(&mut self.place, Place::Header(String::new())) {
            Place::Call(call) => self.end(call, &mut spoken),
            // Of a model that does not keep to the format at all, nothing is lost.
            Place::Header(header) if self.is_first && !header.contains(CHANNEL) => spoken.text = header,
            _ => {}
        }
        spoken
    }

    /// A call whose arguments are whole, or the text that they are instead.
    fn end(&mut self, call: Call, spoken: &mut Spoken) {
        let is_object = call.arguments.trim_start().starts_with('{');
        match serde_json::from_str::<&RawValue>(&call.arguments) {
            Ok(_) if is_object => {
                self.called = true;
                spoken.call = Some(call);
            }
            _ => spoken.text = call.arguments,
        }
    }
}

/// Where a message with this header has its text.
fn begun(header: &str) -> Place {
    // The recipient stands before the channel or behind it.
    if let Some((_, name)) = header.split_once(RECIPIENT) {
        let name = name.split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or_default();
        return Place::Call(Call { name: name.to_owned(), arguments: String::new() });
    }
    let channel = header.split_once(CHANNEL).map_or("", |(_, name)| name).trim();
    if channel.starts_with(THOUGHTS) { Place::Thoughts } else { Place::Answer }
}

/// A control token as part of a rule, as `llguidance` reads it.
fn control(tokenizer: &Tokenizer, name: &str) -> String {
    match tokenizer.encode(name, false).as_deref() {
        Ok([id]) => format!("<[{id}]>"),
        _ => Value::from(name).to_string(),
    }
}

/// The rule of an answer that is `body`, another rule, without thoughts.
pub fn answer_rule(tokenizer: &Tokenizer, body: &str) -> String {
    let [channel, message] = [CHANNEL, MESSAGE].map(|name| control(tokenizer, name));
    format!("{channel} \"{ANSWER}\" {message} {body}")
}

/// The rule of a call of the tool `name` with `arguments`, another rule.
pub fn call_rule(tokenizer: &Tokenizer, name: &str, arguments: &str) -> String {
    let [channel, constrain, message] = [CHANNEL, "<|constrain|>", MESSAGE].map(|name| control(tokenizer, name));
    let to = Value::from(format!("commentary {RECIPIENT}{name} "));
    format!("{channel} {to} {constrain} \"json\" {message} {arguments}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said, of control tokens in angles and texts between them.
    fn said(answer: &str) -> (String, String, Vec<(String, String)>) {
        let mut channels = Channels::default();
        let mut all = (String::new(), String::new(), Vec::new());
        let mut add = |spoken: Spoken| {
            all.0 += &spoken.text;
            all.1 += &spoken.thoughts;
            all.2.extend(spoken.call.map(|call| (call.name, call.arguments)));
        };
        let mut rest = answer;
        while !rest.is_empty() {
            let at = rest.find("<|").unwrap_or(rest.len());
            // Each character is a token.
            rest[..at].split_inclusive(|_| true).for_each(|text| add(channels.push_one("", text)));
            let (control, behind) = rest[at..].split_at(rest[at..].find("|>").map_or(0, |end| end + 2));
            add(channels.push_one(control, ""));
            rest = behind;
        }
        add(channels.finish(""));
        assert_eq!(channels.called(), !all.2.is_empty());
        all
    }

    #[test]
    fn thoughts_and_answers_are_told_apart() {
        let (text, thoughts, calls) = said(
            "<|channel|>analysis<|message|>The user greets.<|end|><|start|>assistant<|channel|>final<|message|>Hello \
             there!<|return|>",
        );
        assert_eq!((text.as_str(), thoughts.as_str(), calls.len()), ("Hello there!", "The user greets.", 0));
        // Cut off in its thoughts.
        let (text, thoughts, _) = said("<|channel|>analysis<|message|>Long");
        assert_eq!((text.as_str(), thoughts.as_str()), ("", "Long"));
        // Cut off in a later header, which is no text.
        let cut = "<|channel|>analysis<|message|>x<|end|><|start|>assistant";
        assert_eq!(said(cut), (String::new(), "x".into(), Vec::new()));
        let mut channels = Channels::default();
        ["<|channel|>", "", "<|message|>"].into_iter().zip(["", "analysis", ""]).for_each(|(control, text)| {
            channels.push_one(control, text);
        });
        assert_eq!(channels.finish("\u{fffd}"), Spoken { thoughts: "\u{fffd}".into(), ..Spoken::default() });
        // What is said before a call is for the user.
        let (text, ..) = said("<|channel|>commentary<|message|>I look it up.<|end|>");
        assert_eq!(text, "I look it up.");
    }

    #[test]
    fn calls_have_the_name_and_the_arguments() {
        let call = vec![("f".to_owned(), "{\"x\": 1}".to_owned())];
        for answer in [
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"x\": 1}<|call|>",
            " to=functions.f<|channel|>commentary json<|message|>{\"x\": 1}",
            "<|channel|>commentary to=functions.f<|message|>{\"x\": 1}<|end|>",
            "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{\"x\": 1}<|call|>",
        ] {
            assert_eq!(said(answer), (String::new(), String::new(), call.clone()), "{answer}");
        }
        let two = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"x\": 1}<|call|><|start|>assistant\
                   <|channel|>commentary to=functions.g <|constrain|>json<|message|>{}<|call|>";
        assert_eq!(said(two).2, [call[0].clone(), ("g".into(), "{}".into())]);
    }

    #[test]
    fn what_keeps_to_no_format_is_text() {
        assert_eq!(said("Hello").0, "Hello");
        assert_eq!(said("<|channel|>commentary to=functions.f <|message|>{\"x\": <|call|>").0, "{\"x\": ");
        assert_eq!(said("<|channel|>commentary to=functions.f <|message|>[1]<|call|>").0, "[1]");
        assert_eq!(said("<|channel|>other<|message|>Text").0, "Text");
        assert_eq!(said("<|message|>Text<|message|> more").0, "Text more");
    }
}
