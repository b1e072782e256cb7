//! What a server does with keys and values: `cargo run --release --example kv_blocks`.
//!
//! A prompt that several conversations share is computed once, they go on from it, and all of them take more memory
//! than there is. The "model" is a sum: the value of a token is the sum of all tokens up to it.

use std::error::Error;

use outcore::{Bytes, DType, PageSize, PolicyKind, Runtime};
use outcore_kv::{KvLayout, KvPart, KvPool, KvShape, Sequence, TenantId, Token};

const LAYERS: u32 = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let page = PageSize::new(Bytes::kib(64))?;
    // 64 pages on the device; what does not fit there goes to a scratch file and comes back.
    let runtime = Runtime::builder().page_size(page).device_budget(Bytes::mib(4)).policy(PolicyKind::Kv).open()?;
    let layout = KvLayout::new(KvShape::new(LAYERS, 4, 64, DType::F32)?, page)?;
    println!(
        "a block: {} tokens of {} layers, {} of {}",
        layout.block_tokens(),
        layout.group_layers(),
        layout.block_bytes(),
        layout.block_room()
    );
    let pool = KvPool::open(&runtime, layout, b"sums of tokens", 256)?;
    let tenant = TenantId::new(1);

    // The first conversation computes the prompt, which is the same in all.
    let prompt: Vec<Token> = (1..=300).map(Token::new).collect();
    let mut first = pool.begin(tenant, &prompt)?;
    let computed = compute(&mut first, &prompt)?;
    println!("the first conversation computed {computed} tokens");

    // The others find it.
    let mut all = vec![first];
    for n in 1..12 {
        let mut tokens = prompt.clone();
        tokens.extend((0..40).map(|m| Token::new(1000 * n + m)));
        let mut next = pool.begin(tenant, &tokens)?;
        let computed = compute(&mut next, &tokens)?;
        assert!(computed < 60, "the prompt was found");
        all.push(next);
    }
    let stats = pool.stats();
    println!("{} of {} blocks of their prompts were found; {} are in use", stats.found, stats.asked, stats.used);

    // Two continuations of one conversation: nothing is copied but the block that is not full.
    let mut fork = all[3].fork();
    for (sequence, token) in [(&mut all[3], 7), (&mut fork, 9)] {
        let positions = sequence.append(&[Token::new(token)])?;
        write(sequence, positions.start, token as f32)?;
        sequence.commit(positions.end)?;
    }
    assert_ne!(all[3].blocks().last(), fork.blocks().last());

    // One that is not needed for some time leaves the device, and comes back group by group.
    all[5].park()?;
    for group in 0..pool.layout().groups() {
        all[5].resume(group)?;
    }
    println!("the sum of the sixth conversation is {}", last(&all[5])?);

    // What a tenant ever stored is gone with one call.
    drop((all, fork));
    pool.delete_tenant(tenant)?;
    assert_eq!(pool.found(tenant, &prompt), 0);
    println!("of {} blocks none is kept", pool.stats().blocks);
    drop(pool);
    runtime.close()?;
    Ok(())
}

/// Computes what the sequence does not have of these tokens, and says how many they were.
fn compute(sequence: &mut Sequence, tokens: &[Token]) -> Result<u64, Box<dyn Error>> {
    let found = sequence.len();
    let mut sum = if found == 0 { 0.0 } else { last(sequence)? };
    let positions = sequence.append(&tokens[found as usize..])?;
    for position in positions.clone() {
        sum += tokens[position as usize].get() as f32;
        write(sequence, position, sum)?;
    }
    sequence.commit(positions.end)?;
    Ok(positions.end - found)
}

/// Writes a token's keys and values in all layers.
fn write(sequence: &Sequence, position: u64, sum: f32) -> Result<(), Box<dyn Error>> {
    let layout = sequence.pool().layout();
    let (_, token) = sequence.place(position);
    for group in 0..layout.groups() {
        let mut blocks = sequence.write(group, position..position + 1)?;
        let mut guard = blocks.pin().wait()?;
        let floats = guard.view_mut::<f32>(0)?;
        for layer in 0..layout.layers_of(group).len() as u32 {
            for part in [KvPart::Keys, KvPart::Values] {
                let row = layout.row(layer, part, token).ok_or("no such row")?;
                floats[row.start / 4..row.end / 4].fill(sum);
            }
        }
    }
    Ok(())
}

/// The value of the last token.
fn last(sequence: &Sequence) -> Result<f32, Box<dyn Error>> {
    let layout = sequence.pool().layout();
    let position = sequence.len() - 1;
    let (group, layer) = layout.group_of(LAYERS - 1);
    let blocks = sequence.read(group, position..position + 1)?;
    let guard = blocks.pin().wait()?;
    let row = layout.row(layer, KvPart::Values, sequence.place(position).1).ok_or("no such row")?;
    Ok(guard.view::<f32>(0)?[row.start / 4])
}
