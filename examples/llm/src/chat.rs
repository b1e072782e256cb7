//! Chat templates: how a list of messages becomes a prompt.

use minijinja::{Environment, Error as JinjaError, ErrorKind, Value, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::{Map, Value as Json};

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

/// A model's own template, in the Jinja dialect that Hugging Face tokenizers use.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

const NAME: &str = "chat";

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
    pub fn new(source: String, bos: String, eos: String) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, JinjaError> {
            Err(JinjaError::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_template_owned(NAME, source).map_err(|e| Error::format("chat template", e))?;
        Ok(Self { environment, bos, eos })
    }

    /// The prompt for `messages`, with the opening of the assistant's turn where `open_turn` is set.
    pub fn render(&self, messages: &[Message], open_turn: bool) -> Result<String> {
        self.render_with(messages, open_turn, &Map::new())
    }

    /// As [`render`](Self::render), with further variables (`enable_thinking`, say). What a template does not know has
    /// no effect.
    pub fn render_with(&self, messages: &[Message], open_turn: bool, more: &Map<String, Json>) -> Result<String> {
        let template = self.environment.get_template(NAME).map_err(|e| Error::format("chat template", e))?;
        let messages: Vec<Value> = messages.iter().map(|m| context! { role => m.role, content => m.content }).collect();
        template
            .render(context! {
                messages,
                add_generation_prompt => open_turn,
                bos_token => self.bos,
                eos_token => self.eos,
                ..Value::from_serialize(more)
            })
            .map_err(|e| Error::format("chat template", e))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{ChatTemplate, Message};

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
}
