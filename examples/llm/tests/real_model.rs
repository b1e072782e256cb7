//! The real SmolLM2-135M-Instruct, where `scripts/fetch_model.sh` has put it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use outcore_llm::{
    ChatTemplate, KvType, Message, Model, ModelFiles, Options, PlainWeights, Session, Tokenizer, argmax,
};
use outcore_testkit::models;

fn model_files() -> Option<ModelFiles> {
    Some(ModelFiles::open(models::fetched_model()?).unwrap())
}

/// The user turn, token by token.
const PROMPT_IDS: [u32; 17] = [1, 4093, 198, 36971, 5798, 3500, 281, 582, 1890, 8510, 30, 2, 198, 1, 520, 9531, 198];

#[test]
fn a_chat_prompt_becomes_known_ids_and_a_known_answer_follows() {
    let Some(files) = model_files() else { return };
    let tokenizer = Tokenizer::load(&files).unwrap();
    let template = ChatTemplate::load(&files, &tokenizer).unwrap().unwrap();
    let question = "Explain virtual memory in one short paragraph.";
    let chat = template.render(&[Message::new("user", question)], true).unwrap();
    assert!(chat.starts_with("<|im_start|>system\nYou are a helpful AI assistant named SmolLM"), "{chat:?}");
    let turn = chat.split_once("<|im_end|>\n").unwrap().1;
    let ids = tokenizer.encode(turn, false).unwrap();
    assert_eq!(ids, PROMPT_IDS);

    let model = Model::load(&files, Arc::new(PlainWeights::read(&files).unwrap()), Options::default()).unwrap();
    let mut session = Session::new(Arc::new(model), 64, KvType::F32).unwrap();
    let mut logits = session.forward(&ids).unwrap();
    let mut made = Vec::new();
    for _ in 0..12 {
        let next = argmax(&logits);
        made.push(next);
        logits = session.forward(&[next]).unwrap();
    }
    assert_eq!(tokenizer.decode(&made), "Virtual memory is a type of memory that allows a computer to");
}
