//! Chat templates: how a list of messages becomes a prompt.

use std::io::{self, Write};

use minijinja::value::Kwargs;
use minijinja::{Environment, Error as JinjaError, ErrorKind, State, Value, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use regex::{Captures, Regex};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use serde_json::{Map, Value as Json};

use crate::chat_bounds::{Bounded, Charged};
use crate::error::{Error, Result};
use crate::files::{Container, ModelFiles, read_json};
use crate::tokenizer::Tokenizer;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl Message {
    /// A turn of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// A turn of a conversation in which tools are called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// What was said, if anything.
    pub content: Option<String>,
    /// The tools that the assistant calls.
    pub calls: Vec<Call>,
    /// The call whose result this is, by its id.
    pub call: Option<String>,
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Tells it from others.
    pub id: String,
    /// The function's name.
    pub name: String,
    /// A JSON object, as text.
    pub arguments: String,
}

impl From<Message> for Turn {
    fn from(message: Message) -> Self {
        Self { role: message.role, content: Some(message.content), ..Self::default() }
    }
}

/// What a template takes of a turn in which tools are called. Templates differ, and do not say.
#[derive(Clone, Copy, Debug)]
struct Taken {
    /// No content; else the empty text.
    none: bool,
    /// Arguments as an object; else its text.
    objects: bool,
}

impl Taken {
    /// As transformers has it, and what is tried where that fails.
    const ALL: [Self; 4] = [
        Self { none: true, objects: true },
        Self { none: false, objects: true },
        Self { none: true, objects: false },
        Self { none: false, objects: false },
    ];
}

impl Turn {
    /// Bytes of its text.
    fn bytes(&self) -> usize {
        let calls = self.calls.iter().map(|call| call.id.len() + call.name.len() + call.arguments.len());
        self.content.as_ref().map_or(0, String::len) + calls.sum::<usize>()
    }

    /// As templates know it from the `transformers` library.
    fn value(&self, taken: Taken) -> Result<Value> {
        let content = match &self.content {
            None if taken.none => Value::from(()),
            content => Value::from(content.as_deref().unwrap_or_default()),
        };
        let mut members = vec![("role", Value::from(&self.role)), ("content", content)];
        if !self.calls.is_empty() {
            members.push(("tool_calls", self.calls.iter().map(|call| call.value(taken)).collect::<Result<Value>>()?));
        }
        members.extend(self.call.as_ref().map(|id| ("tool_call_id", Value::from(id))));
        Ok(members.into_iter().collect())
    }
}

impl Call {
    fn value(&self, taken: Taken) -> Result<Value> {
        let object = json("arguments of a call", &self.arguments)?;
        let arguments = if taken.objects { object } else { Value::from(&self.arguments) };
        let function = [("name", Value::from(&self.name)), ("arguments", arguments)];
        let members = [
            ("id", Value::from(&self.id)),
            ("type", Value::from("function")),
            ("function", function.into_iter().collect()),
        ];
        Ok(members.into_iter().collect())
    }
}

/// What a text of JSON says, with members in their order.
fn json(what: &str, text: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|e| Error::format(what, e))
}

/// JSON on one line, with spaces behind commas and colons: models are trained on what Python writes.
struct OneLine;

impl Formatter for OneLine {
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

/// The filter `tojson`. Unlike that of web pages, it escapes nothing that JSON does not.
fn to_json(state: &State<'_, '_>, value: &Value, options: Kwargs) -> std::result::Result<String, JinjaError> {
    const INDENT_MOST: usize = 16;
    // A character of two bytes becomes six.
    const ESCAPED_EACH: usize = 3;
    let indent: Option<usize> = options.get("indent")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    if indent.is_some_and(|indent| indent > INDENT_MOST) {
        let why = format!("tojson takes an indent of at most {INDENT_MOST}");
        return Err(JinjaError::new(ErrorKind::InvalidOperation, why));
    }
    let mut out = Charged::of(state)?;
    let spaces = " ".repeat(indent.unwrap_or(0));
    let written = match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut out, OneLine)),
        Some(_) => {
            let pretty = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut out, pretty))
        }
    };
    let wrong = |why: String| JinjaError::new(ErrorKind::BadSerialization, why);
    written.map_err(|error| wrong(error.to_string()))?;
    if ascii == Some(true) {
        out.charge_each(ESCAPED_EACH)?;
    }
    let text = String::from_utf8(out.into_bytes()).map_err(|error| wrong(error.to_string()))?;
    if ascii != Some(true) {
        return Ok(text);
    }
    let mut escaped = String::with_capacity(text.len());
    let mut units = [0; 2];
    for c in text.chars() {
        match c {
            c if c.is_ascii() => escaped.push(c),
            c => c.encode_utf16(&mut units).iter().for_each(|unit| escaped += &format!("\\u{unit:04x}")),
        }
    }
    Ok(escaped)
}

/// The filter `length`. What is undefined has none, as in Python's Jinja.
fn length(value: &Value) -> std::result::Result<usize, JinjaError> {
    let none =
        || JinjaError::new(ErrorKind::InvalidOperation, format!("a value of type {} has no length", value.kind()));
    if value.is_undefined() { Ok(0) } else { value.len().ok_or_else(none) }
}

/// A model's own template, in the Jinja dialect that Hugging Face tokenizers use.
#[derive(Debug)]
pub struct ChatTemplate {
    template: Bounded,
    source: String,
    bos: String,
    eos: String,
}

/// The time by Coordinated Universal Time, in the words of `strftime`, as transformers' templates ask for the date.
fn now(format: &str) -> Result<String, JinjaError> {
    let wrong = |why: String| JinjaError::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {why}"));
    if format.len() > DATE_MOST {
        let why = format!("strftime_now takes a format of at most {DATE_MOST} bytes");
        return Err(JinjaError::new(ErrorKind::InvalidOperation, why));
    }
    let items = time::format_description::parse_strftime_owned(format).map_err(|e| wrong(e.to_string()))?;
    time::UtcDateTime::now().format(&items).map_err(|e| wrong(e.to_string()))
}

/// A tag of transformers, which marks what training looks at.
const GENERATION: &str = r"(?<open>\{%[-+]?)\s*(?<end>end)?generation\s*(?<close>[-+]?%\})";
/// The longest reason that a template may give for refusing a conversation, in characters.
const REASON_MOST: usize = 1000;
/// The longest format of a date, in bytes.
const DATE_MOST: usize = 200;
/// The most steps of a template. The longest conversations take a small part of that.
const STEPS_MOST: u64 = 4_000_000;

impl ChatTemplate {
    /// The template that `files` carry (GGUF metadata, `chat_template.jinja` or `tokenizer_config.json`), if any.
    pub fn load(files: &ModelFiles, tokenizer: &Tokenizer) -> Result<Option<Self>> {
        let source = match files.container() {
            Container::Gguf => {
                files.metadata().get("tokenizer.chat_template").and_then(Json::as_str).map(str::to_owned)
            }
            Container::Safetensors => {
                let alone = files.folder().join("chat_template.jinja");
                let config = files.folder().join("tokenizer_config.json");
                if alone.is_file() {
                    let what = || format!("cannot read {}", alone.display());
                    Some(std::fs::read_to_string(&alone).map_err(|e| Error::io(what(), e))?)
                } else if config.is_file() {
                    read_json(&config)?.get("chat_template").and_then(Json::as_str).map(str::to_owned)
                } else {
                    None
                }
            }
        };
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.token(id)).unwrap_or_default().to_owned();
        source.map(|s| Self::new(s, text(tokenizer.bos()), text(tokenizer.eos().first().copied()))).transpose()
    }

    /// A template from its source and the texts of the begin and end tokens.
    ///
    /// # Errors
    /// What is no template, and what has no bound of memory: other templates, calls with `*`, large constants.
    pub fn new(source: String, bos: String, eos: String) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", |message: &str| -> Result<Value, JinjaError> {
            Err(JinjaError::new(ErrorKind::InvalidOperation, message.chars().take(REASON_MOST).collect::<String>()))
        });
        environment.add_function("strftime_now", now);
        environment.add_filter("tojson", to_json);
        environment.add_filter("length", length);
        environment.set_fuel(Some(STEPS_MOST));
        let generation = Regex::new(GENERATION).map_err(|e| Error::format("chat template", e))?;
        let known = generation.replace_all(&source, |tag: &Captures<'_>| {
            let (open, close) = (&tag["open"], &tag["close"]);
            let tag = if tag.name("end").is_some() { "endif" } else { "if true" };
            format!("{open} {tag} {close}")
        });
        let template = Bounded::new(environment, known.into_owned()).map_err(|e| Error::format("chat template", e))?;
        Ok(Self { template, source, bos, eos })
    }

    /// The prompt for `messages`, with the opening of the assistant's turn where `open_turn` is set.
    pub fn render(&self, messages: &[Message], open_turn: bool) -> Result<String> {
        self.render_with(messages, open_turn, &Map::new())
    }

    /// As [`render`](Self::render), with further variables (`enable_thinking`, say). What a template does not know has
    /// no effect.
    pub fn render_with(&self, messages: &[Message], open_turn: bool, more: &Map<String, Json>) -> Result<String> {
        let given = messages.iter().map(|m| m.content.len()).sum();
        let messages: Vec<Value> = messages.iter().map(|m| context! { role => m.role, content => m.content }).collect();
        self.render_values((messages, given), None, open_turn, more)
    }

    /// As [`render_with`](Self::render_with), with calls of tools. `tools` is a JSON array of their definitions.
    ///
    /// # Errors
    /// What is no JSON, what the template refuses, and a rendering that takes too many steps, or makes too many bytes
    /// of texts and lists.
    pub fn render_turns(
        &self,
        turns: &[Turn],
        tools: Option<&str>,
        open_turn: bool,
        more: &Map<String, Json>,
    ) -> Result<String> {
        let given = turns.iter().map(Turn::bytes).sum::<usize>() + tools.map_or(0, str::len);
        let tools = tools.map(|tools| json("tools", tools)).transpose()?;
        let render = |taken| {
            let turns = turns.iter().map(|turn| turn.value(taken)).collect::<Result<_>>()?;
            self.render_values((turns, given), tools.clone(), open_turn, more)
        };
        let [first, others @ ..] = Taken::ALL;
        let has_calls = turns.iter().any(|turn| turn.content.is_none() || !turn.calls.is_empty());
        render(first).or_else(|error| {
            let mut others = others.into_iter().filter(|_| has_calls);
            others.find_map(|taken| render(taken).ok()).ok_or(error)
        })
    }

    /// `given` is how many bytes of text the messages, and the tools, have.
    fn render_values(
        &self,
        (messages, given): (Vec<Value>, usize),
        tools: Option<Value>,
        open_turn: bool,
        more: &Map<String, Json>,
    ) -> Result<String> {
        // A template asks whether there are tools by whether they are defined, or by whether they are none.
        let tools = tools.map_or_else(|| context! {}, |tools| context! { tools });
        let variables = context! {
            messages,
            add_generation_prompt => open_turn,
            bos_token => self.bos,
            eos_token => self.eos,
            ..context! { ..tools, ..Value::from_serialize(more) }
        };
        let rendered = self.template.render(variables, given);
        rendered.map_err(|error| match error.kind() {
            ErrorKind::OutOfFuel => {
                let why = format!("it takes more than {STEPS_MOST} steps: shorten the conversation");
                Error::format("chat template", why)
            }
            _ => Error::format("chat template", error),
        })
    }

    /// Whether its source has this text somewhere.
    pub fn mentions(&self, text: &str) -> bool {
        self.source.contains(text)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{Call, ChatTemplate, Message, Turn};

    #[test]
    fn further_variables_reach_the_template_and_replace_none_of_its_own() {
        let source = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
                      {% if enable_thinking is defined and not enable_thinking %}<no_think>{% endif %}\
                      {{ reasoning_effort | default('medium') }}{% if add_generation_prompt %}<assistant>{% endif %}";
        let template = ChatTemplate::new(source.to_owned(), "<s>".to_owned(), "</s>".to_owned()).unwrap();
        let messages = [Message::new("user", "hello")];
        assert_eq!(template.render(&messages, true).unwrap(), "<s><user>hellomedium<assistant>");
        let more = json!({
            "enable_thinking": false, "reasoning_effort": "high", "unknown": [1], "messages": [], "bos_token": "x",
            "add_generation_prompt": true,
        });
        let rendered = template.render_with(&messages, false, more.as_object().unwrap()).unwrap();
        assert_eq!(rendered, "<s><user>hello<no_think>high");
    }

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source.to_owned(), String::new(), String::new()).unwrap()
    }

    /// What Python's Jinja and transformers know beyond the language.
    #[test]
    fn templates_of_transformers_are_rendered() {
        let source = "{%- generation -%} a {%- endgeneration %}{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}\
                      {% endif %}{{ i }}{% endfor %}{{ nothing | length }}{{ 'abc' | length }}";
        assert_eq!(template(source).render(&[], true).unwrap(), "a103");
        assert!(template("{{ 7 | length }}").render(&[], true).is_err());
    }

    /// Some templates take no content of none, and some take arguments as a text.
    #[test]
    fn a_turn_of_calls_only_is_given_as_the_template_takes_it() {
        let call = Call { id: "1".into(), name: "f".into(), arguments: r#"{"x": 1}"#.into() };
        let turns = [Turn { role: "assistant".into(), calls: vec![call], ..Turn::default() }];
        let one = |source: &str| template(source).render_turns(&turns, None, true, &serde_json::Map::new());
        let call = "messages[0].tool_calls[0].function.arguments";
        assert_eq!(one("{{ messages[0].content is none }}").unwrap(), "True");
        assert_eq!(one("{{ 'x' in messages[0].content }}").unwrap(), "False");
        assert_eq!(one(&format!("{{{{ {call}.x }}}}")).unwrap(), "1");
        assert_eq!(one(&format!("{{{{ '>' + {call} }}}}")).unwrap(), r#">{"x": 1}"#);
        assert_eq!(one(&format!("{{{{ messages[0].content + {call} }}}}")).unwrap(), r#"{"x": 1}"#);
        assert!(one("{{ raise_exception('never') }}").unwrap_err().to_string().contains("never"));
    }

    #[test]
    fn a_template_may_ask_for_the_date() {
        let year = template("{{ strftime_now('%Y-%m-%d') }}").render(&[], true).unwrap();
        let parts: Vec<u32> = year.split('-').map(|part| part.parse().unwrap()).collect();
        assert!(parts.len() == 3 && parts[0] > 2000 && (1..=12).contains(&parts[1]) && year.len() == 10, "{year}");
        let error = template("{{ strftime_now('%') }}").render(&[], true).unwrap_err().to_string();
        assert!(error.contains("strftime_now"), "{error}");
        let error = template("{{ strftime_now('%Y' * 200) }}").render(&[], true).unwrap_err().to_string();
        assert!(error.contains("200 bytes"), "{error}");
        let error = template("{{ raise_exception('a' * 5000) }}").render(&[], true).unwrap_err().to_string();
        assert!(error.contains("aaa") && error.len() < 1100, "{}", error.len());
    }

    #[test]
    fn tools_and_calls_reach_the_template_with_members_in_their_order() {
        let source = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]\
                      {% if m.content is not none %}{{ m.content }}{% endif %}\
                      {% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function | tojson }}{{ c.type }}{% endfor %}\
                      {% endif %}{{ m.tool_call_id }}{% endfor %}";
        let template = template(source);
        let turns = [
            Turn { role: "user".into(), content: Some("hello".into()), ..Turn::default() },
            Turn {
                role: "assistant".into(),
                calls: vec![Call { id: "1".into(), name: "f".into(), arguments: r#"{"z":[1,2],"a":"<b>"}"#.into() }],
                ..Turn::default()
            },
            Turn { role: "tool".into(), content: Some("5".into()), call: Some("1".into()), ..Turn::default() },
        ];
        let tools = r#"[{"type":"function","function":{"name":"f","description":"\u00fc"}}]"#;
        let rendered = template.render_turns(&turns, Some(tools), true, &serde_json::Map::new()).unwrap();
        let wanted = "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": \"\u{fc}\"}}]\
                      [user]hello[assistant]{\"name\": \"f\", \"arguments\": {\"z\": [1, 2], \"a\": \"<b>\"}}function\
                      [tool]51";
        assert_eq!(rendered, wanted);
        let rendered = template.render_turns(&turns[..1], None, true, &serde_json::Map::new()).unwrap();
        assert_eq!(rendered, "[user]hello");
        assert!(template.mentions("tools") && !template.mentions("[TOOL_CALLS]"));
        let wrong = Call { id: "1".into(), name: "f".into(), arguments: "{".into() };
        let turns = [Turn { role: "assistant".into(), calls: vec![wrong], ..Turn::default() }];
        assert!(template.render_turns(&turns, None, true, &serde_json::Map::new()).is_err());
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let tools = r#"[{"a":{},"b":[[],null,true,1.5]}]"#;
        let one = |source| template(source).render_turns(&[], Some(tools), true, &serde_json::Map::new());
        assert_eq!(one("{{ tools | tojson }}").unwrap(), r#"[{"a": {}, "b": [[], null, true, 1.5]}]"#);
        let pretty = serde_json::to_string_pretty(&json!([{ "a": {}, "b": [[], null, true, 1.5] }])).unwrap();
        assert_eq!(one("{{ tools | tojson(indent=2) }}").unwrap(), pretty);
        assert!(one("{{ tools | tojson(indent=17) }}").is_err());
        let tools = r#"["\u00fc\ud83d\ude00"]"#;
        let one = |source| template(source).render_turns(&[], Some(tools), true, &serde_json::Map::new());
        assert_eq!(one("{{ tools | tojson }}").unwrap(), "[\"\u{fc}\u{1f600}\"]");
        assert_eq!(one("{{ tools | tojson(ensure_ascii=true) }}").unwrap(), tools);
    }

    /// Each would take gigabytes, but for the bounds.
    #[test]
    fn a_template_that_makes_too_much_is_given_up() {
        let repeated = |start: &str, step: &str, end: &str| {
            format!("{{% set ns = namespace(s={start}) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{end}")
        };
        let set = |expression: &str| format!("{{% set ns.s = {expression} %}}");
        let long = "{% set a = 'abcdefgh' * 100000 %}";
        let grows = [
            "{% set a = [] %}{% for x in a * 10 ** 18 %}{% endfor %}".to_owned(),
            repeated("'ab'", &set("ns.s ~ ns.s"), ""),
            repeated("'ab'", &set("ns.s + ns.s"), ""),
            repeated("'ab'", &set("ns.s * 2"), ""),
            repeated("'ab'", &set("2 * ns.s"), ""),
            repeated("'ab'", &set("ns.s.replace('a', ns.s)"), ""),
            repeated("'ab'", &set("ns.s | replace('a', ns.s)"), ""),
            repeated("'ab'", &set("[ns.s, ns.s] | join"), ""),
            repeated("'ab'", &set("[ns.s, ns.s] | join(ns.s)"), ""),
            repeated("'ab'", &set("ns.s.join([ns.s, ns.s])"), ""),
            repeated("'ab'", &set("'%s%s' | format(ns.s, ns.s)"), ""),
            repeated("'ab'", &set("'{0}{0}'.format(ns.s)"), ""),
            repeated("'ab'", &set("[ns.s, ns.s] | string"), ""),
            repeated("'ab'", &set("[ns.s, ns.s] | tojson"), ""),
            repeated("'ab'", &set("[[ns.s], [ns.s]] | map('join') | map('string') | join"), ""),
            repeated("'ab'", "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}", ""),
            repeated("'ab'", "{% macro m(t) %}{{ t }}{{ t }}{% endmacro %}{% set ns.s = m(ns.s) %}", ""),
            repeated(
                "'ab'",
                "{% set x %}{% filter upper %}{{ ns.s }}{{ ns.s }}{% endfilter %}{% endset %}\
                              {% set ns.s = x %}",
                "",
            ),
            repeated("[1]", &set("ns.s + ns.s"), ""),
            repeated("[1]", &set("ns.s * 2"), ""),
            repeated("[1]", &set("(ns.s + ns.s) | list"), ""),
            "{% set l = [1] %}{{ (l * 99999999999) | list }}".to_owned(),
            "{% set l = [1] %}{{ (l * 99999999999) in 'abc' }}".to_owned(),
            "{% set l = [1] %}{{ [l * 99999999999] | select('in', 'abc') | list }}".to_owned(),
            format!("{long}{{% set b = [a] * 100000 %}}{{{{ b }}}}"),
            format!("{long}{{% set b = [a] * 100000 %}}{{{{ b | tojson }}}}"),
            format!("{long}{{% set b = [a] * 100000 %}}{{{{ b | join }}}}"),
            format!("{long}{{% set b = [a] * 100000 %}}{{{{ b in 'abc' }}}}"),
            format!("{long}{{{{ a | replace('', a) }}}}"),
            format!("{long}{{{{ a | list }}}}{{{{ a.replace('a', '\n') | indent(1000000) }}}}"),
            "{{ 'a' | indent(99999999999) }}".to_owned(),
            "{% set a = 'a b' %}{{ a * 30000000 }}".to_owned(),
            format!("{{% for i in range(90000) %}}{}{{% endfor %}}", "text ".repeat(1000)),
            format!("{{% set x %}}{{% for i in range(90000) %}}{}{{% endfor %}}{{% endset %}}", "text ".repeat(1000)),
            format!(
                "{long}{{% set n = namespace(l=[]) %}}{{% for i in range(9999) %}}{{% set n.l = n.l + [a.upper()] %}}\
                     {{% endfor %}}"
            ),
            format!("{long}{{% for i in range(9999) %}}{{{{ a.split('a') | length }}}}{{% endfor %}}"),
            format!(
                "{long}{{% autoescape true %}}{{% for i in range(99) %}}{{{{ a }}}}{{% endfor %}}{{% endautoescape %}}"
            ),
        ];
        for source in &grows {
            let error = template(source).render(&[], true).unwrap_err().in_full();
            assert!(error.contains("67108864 bytes of texts and lists"), "{source}: {error}");
            assert!(error.contains("chat template") && error.contains("shorten"), "{source}: {error}");
        }
    }

    /// They are dropped, compared and written by recursion, and those in a circle are never dropped.
    #[test]
    fn values_of_a_template_are_neither_deep_nor_in_a_circle() {
        let repeated =
            |step: &str| format!("{{% set ns = namespace(s=[]) %}}{{% for i in range(90000) %}}{step}{{% endfor %}}");
        let bad = [
            (repeated("{% set ns.s = [ns.s] %}"), "160 levels"),
            (repeated("{% set ns.s = {'a': ns.s} %}"), "160 levels"),
            (repeated("{% set ns.s = dict(a=ns.s) %}"), "160 levels"),
            (repeated("{% set ns.s = [ns.s, ns.s] %}"), "4194304 values"),
            ("{% set a = [] %}".to_owned() + &"{% set a = [a] %}".repeat(1000), "160 levels"),
            ("{% set ns = namespace() %}{% set ns.a = ns %}".to_owned(), "a namespace keeps"),
            ("{% set ns = namespace() %}{% set ns.a = [ns] %}".to_owned(), "a namespace keeps"),
            ("{% set ns = namespace(b=1) %}{% set ns.a = [ns.keys()] %}".to_owned(), "a namespace keeps"),
            ("{% set ns = namespace(b=1) %}{% set ns.a = {'x': ns.items()} %}".to_owned(), "a namespace keeps"),
            ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".to_owned(), "recursion"),
            ("{% macro m(d) %}{{ d.m(d) }}{% endmacro %}{{ m({'m': m}) }}".to_owned(), "recursion"),
        ];
        for (source, why) in &bad {
            let error = template(source).render(&[], true).unwrap_err().in_full();
            assert!(error.contains(why), "{source:.200}: {error}");
        }
        let keys = "{% set ns = namespace(b=1) %}{% set ns.a = ns.keys() %}{{ ns.a | join }}";
        assert_eq!(template(keys).render(&[], true).unwrap(), "b");
    }

    #[test]
    fn a_template_without_bounds_is_refused() {
        let of = |source: &str| ChatTemplate::new(source.to_owned(), String::new(), String::new());
        let constants = format!("{{{{ {} }}}}", vec!["('a' * 10 ** 8)"; 100].join(" ~ "));
        let bad = [
            (constants, "constants"),
            ("{{ 'a' * 99999999 }}".to_owned(), "constants"),
            ("{{ ['a' * 1000] * 1000 * 1000 }}".to_owned(), "constants"),
            ("{% for x in [] * 1000000000000 %}{% endfor %}".to_owned(), "constants"),
            (format!("{{{{ {} }}}}", vec!["a"; 600].join(" ~ ")), "1000 words"),
            (format!("{{{{ {}a{} }}}}", "(".repeat(400), ")".repeat(400)), "recursion"),
            (format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(600)), "500 times 'elif'"),
            ("a".repeat(300_000), "262144"),
            ("{{ f(*a) }}".to_owned(), "a call with '*'"),
            ("{{ dict(**a) }}".to_owned(), "a call with '*'"),
            ("{% include 'chat' %}".to_owned(), "another template"),
            ("{% extends 'chat' %}".to_owned(), "another template"),
            ("{% import 'chat' as c %}".to_owned(), "another template"),
            ("{{ 1 in a in b }}".to_owned(), "chain"),
        ];
        for (source, why) in &bad {
            let error = of(source).unwrap_err().in_full();
            assert!(error.contains(why) && error.contains("chat template"), "{source:.200}: {error}");
        }
        let filters = [
            ("{{ 'a' | pprint }}", "pprint"),
            ("{{ ['abc'] | map('batch', 1) }}", "batch"),
            ("{{ [[1]] | sum }}", "sum"),
            ("{{ '%99999d' | format(1) }}", "4 digits"),
            ("{{ '%.99999f' | format(1) }}", "4 digits"),
            ("{{ '{:>99999}'.format(1) }}", "4 digits"),
            ("{{ debug() }}", "debug"),
            ("{{ '(concat)' | map('(concat)') }}", "(concat)"),
        ];
        for (source, why) in filters {
            let error = of(source).unwrap().render(&[], true).unwrap_err().in_full();
            assert!(error.contains(why), "{source}: {error}");
        }
    }

    /// Every kind of instruction whose place the charges change.
    #[test]
    fn what_a_template_says_does_not_change_with_the_bounds() {
        let cases = [
            ("{{ 1 + 2 * 3 - 4 }}{{ 'a' ~ 1 ~ none }}{{ 'a' + 'b' }}{{ [1] + [2] }}", "3a1Noneab[1, 2]"),
            (
                "{{ 7 - 2 }}{{ 2 * 'ab' }}{{ 'ab' * 2 }}{{ [0] * 2 }}{{ 2 ** 3 }}{{ 7 // 2 }}{{ 7 % 4 }}",
                "5abababab[0, 0]833",
            ),
            (
                "{{ 'a' in 'abc' }}{{ 1 in [2] }}{{ 1 not in [2] }}{{ 'a' in {'a': 1} }}{{ 'b' is in ['b'] }}",
                "TrueFalseTrueTrueTrue",
            ),
            ("{{ 1 < 2 < 3 }}{{ 'x' if 1 in [1] and not 2 in [1] else 'y' }}", "Truex"),
            (
                "{% for a, b in {'x': 1, 'y': 2} | items if b > 1 %}{{ loop.index }}{{ a }}{{ b }}{% else %}-{% endfor %}",
                "1y2",
            ),
            (
                "{% for a in [] %}{% else %}none{% endfor %}{% for a in [1, 2, 3] %}{% if a == 2 %}{% continue %}{% endif %}\
              {{ a }}{{ loop.cycle('p', 'q') }}{% endfor %}",
                "none1p3p",
            ),
            (
                "{% for a in [1, [2, [3]]] recursive %}{% if a is sequence %}({{ loop(a) }}){% else %}{{ a }}{% endif %}\
              {% endfor %}",
                "1(2(3))",
            ),
            (
                "{% macro m(a, b='d', c=none) %}[{{ a }}{{ b }}{{ c }}{{ caller() if caller else '' }}]{% endmacro %}\
              {{ m(1) }}{{ m(1, c=2) }}{% call m(3) %}in{% endcall %}",
                "[1dNone][1d2][3dNonein]",
            ),
            (
                "{% macro f(n) %}{% if n > 0 %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) | length }}{{ f(3) }}",
                "3321",
            ),
            (
                "{% set ns = namespace(a=1, l=[]) %}{% for i in range(3) %}{% set ns.a = ns.a + i %}\
              {% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.a }}{{ ns.l }}{{ ns.l[1:] }}{{ ns.l[::-1] }}",
                "4[0, 1, 2][1, 2][2, 1, 0]",
            ),
            (
                "{% set x %}a{{ 1 }}<{% endset %}{{ x }}{% filter upper %}b{{ x }}{% endfilter %}{% with y = 2 %}{{ y }}{% endwith %}",
                "a1<BA1<2",
            ),
            ("{% block b %}in{{ 1 }}{% endblock %}{{ self.b() }}", "in1in1"),
            (
                "{{ 'a-b'.split('-') | length }}{{ ' a '.strip() }}{{ 'ab'.replace('a', 'c') }}{{ ','.join(['x', 'y']) }}{{ {'k': 1}.get('k') }}\
              {{ '%s-%d' | format('a', 3) }}{{ '{}{:>3}'.format(1, 2) }}",
                "2acbx,y1a-31  2",
            ),
            (
                "{{ 'Ab' | lower }}{{ ['a', 'b'] | join(', ') }}{{ [{'r': 1}, {'r': 2}] | map(attribute='r') | list }}\
              {{ ['a'] | map('upper') | first }}{{ [1, 2] | select('in', [2]) | list }}{{ [3, 1] | sort }}",
                "aba, b[1, 2]A[2][1, 3]",
            ),
            (
                "{{ [{'r': 'x'}, {'r': 'y'}] | selectattr('r', 'equalto', 'y') | list | length }}{{ none | default('d', true) }}\
              {{ 'a\nb' | indent(2) }}{{ 'x' | replace('x', 'yy') }}",
                "1da\n  byy",
            ),
            ("  {% if true %}\n  a\n  {% endif %}\n {{- 'b' -}} \n c", "  a\nbc"),
            ("{% autoescape true %}<{{ '<' }}{% endautoescape %}{{ '<' }}", "<&lt;<"),
            ("{{ messages[0]['content'][0:3] }}{{ messages | length }}{{ nothing is defined }}", "hel1False"),
        ];
        for (source, wanted) in cases {
            let text = template(source).render(&[Message::new("user", "hello")], true);
            assert_eq!(text.map_err(|error| error.in_full()).as_deref(), Ok(wanted), "{source}");
        }
    }

    #[test]
    fn a_template_without_end_is_given_up() {
        let loops = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}";
        let error = template(loops).render(&[], true).unwrap_err();
        assert!(error.in_full().contains("4000000 steps"), "{}", error.in_full());
    }
}
