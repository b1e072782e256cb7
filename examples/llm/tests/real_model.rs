//! The real SmolLM2-135M-Instruct, where `scripts/fetch_model.sh` has put it.

use std::path::PathBuf;
use std::sync::Arc;

use outcore_llm::{
    ChatTemplate, KvType, Message, Model, ModelFiles, Options, PlainWeights, Session, Tokenizer, argmax,
};

fn model_files() -> Option<ModelFiles> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !path.is_file() {
        eprintln!("SKIPPED: {} is absent; scripts/fetch_model.sh gets it", path.display());
        return None;
    }
    Some(ModelFiles::open(path).unwrap())
}

#[test]
fn chat_prompt_becomes_known_ids_and_known_words_follow() {
    let Some(files) = model_files() else { return };
    let tokenizer = Tokenizer::load(&files).unwrap();
    let template = ChatTemplate::load(&files, &tokenizer).unwrap().unwrap();
    let prompt = template.render(&[Message::new("user", "Explain virtual memory in one paragraph.")], true).unwrap();
    eprintln!("{prompt:?}");
    let ids = tokenizer.encode(&prompt, false).unwrap();
    eprintln!("{} {ids:?}", ids.len());
    let model = Model::load(&files, Arc::new(PlainWeights::read(&files).unwrap()), Options::default()).unwrap();
    let mut session = Session::new(Arc::new(model), 512, KvType::F32).unwrap();
    let mut logits = session.forward(&ids).unwrap();
    let mut made = Vec::new();
    for _ in 0..64 {
        let next = argmax(&logits);
        if tokenizer.is_end(next) {
            break;
        }
        made.push(next);
        logits = session.forward(&[next]).unwrap();
    }
    eprintln!("{made:?}\n{}", tokenizer.decode(&made));
}
