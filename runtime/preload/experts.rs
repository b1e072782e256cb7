//! What the routers of a model have chosen, or are about to: its experts are read before the program touches them.

use std::sync::Arc;

use outcore_mapped::{LayerExperts, Mapped};

use crate::inside::{do_ours, ours};
use crate::pool::{Known, pool};
use crate::predict::Routers;
use crate::process::in_a_child;
use crate::routing_state;

/// What the router of a layer was given: as many numbers for each token.
#[derive(Debug)]
pub struct RouterInput {
    pub layer: u32,
    pub numbers: Vec<f32>,
    pub tokens: usize,
}

/// Files that are mapped of a model, with their numbers in it, and its routers.
struct OfModel {
    files: Vec<(Option<u32>, Arc<Mapped>)>,
    routers: Arc<Routers>,
}

/// What the program has mapped of the only model that fits. Of two models nobody knows which one is meant: their
/// experts come as they are touched. Nothing in a child by `fork`, which has a copy of this, and reads the files
/// themselves.
fn only_model(fits: impl Fn(&Known) -> bool) -> Option<OfModel> {
    let pool = pool().filter(|_| !in_a_child())?;
    let files = pool.files.lock();
    // One that the program has unmapped is not meant.
    let found: Vec<&Known> = files.iter().filter(|known| !known.given.is_empty() && fits(known)).collect();
    let first = found.first()?;
    if !found.iter().all(|known| known.mapped.is_of_model_of(&first.mapped)) {
        routing_state::two_models();
        return None;
    }
    let number = |known: &&Known| (first.routers.file(&known.path), known.mapped.clone());
    Some(OfModel { files: found.iter().map(number).collect(), routers: first.routers.clone() })
}

/// Whether what the router of this layer is given tells of the experts of the next one.
pub fn can_predict(layer: u32) -> bool {
    ours(|| only_model(|known| known.routers.know_what_follows(layer)).map(drop)).is_some()
}

/// The program uses these experts of a layer next, `used` for each token. Returns when they are there. `input` is what
/// the router was given, if that is known.
pub fn experts(layer: u32, experts: &[u32], used: usize, input: Option<&RouterInput>) {
    // What the store closes meanwhile is the library's.
    do_ours(|| expect(layer, experts, used, input));
}

fn expect(layer: u32, experts: &[u32], used: usize, input: Option<&RouterInput>) {
    let has_all = |known: &Known| experts.iter().all(|expert| known.mapped.has_expert(layer, *expert));
    let Some(OfModel { files, routers }) = only_model(has_all) else { return };
    let Some((_, one)) = files.first() else { return };
    // What could not be read now is tried again when it is touched, and is a signal if that fails too.
    let input = input.filter(|input| input.layer == layer);
    let bytes = |number| files.iter().find(|(file, _)| *file == Some(number)).map(|(_, mapped)| &***mapped);
    let next = input.map(|input| routers.predict(&bytes, layer, &input.numbers, input.tokens, used));
    // A model whose experts end here has no others to expect.
    let _ = match next.filter(|next| !next.is_empty() && next.iter().all(|expert| one.has_expert(layer + 1, *expert))) {
        Some(next) => one
            .expert_hint_before(LayerExperts { layer, experts }, &[LayerExperts { layer: layer + 1, experts: &next }]),
        None => one.expert_hint(layer, experts),
    };
}
