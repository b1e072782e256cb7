//! What came of reading the router's choices, as it is told of: `routing.rs` reads them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use outcore_mapped::live::{Experts, Routing};

/// Whether a file with experts was mapped.
static HAS_EXPERTS: AtomicBool = AtomicBool::new(false);
/// What was last done about routing, as a number of [`STATES`].
static STATE: AtomicUsize = AtomicUsize::new(0);
const STATES: [Routing; 5] =
    [Routing::NeverAsked, Routing::NoFunctions, Routing::OwnCallback, Routing::Off, Routing::NothingChosen];
/// Whether hints were left out because two models have such a layer.
static TWO_MODELS: AtomicBool = AtomicBool::new(false);

pub fn note(state: Routing) {
    STATE.store(STATES.iter().position(|known| *known == state).unwrap_or(0), Ordering::Relaxed);
}

/// Nobody knows which model is meant.
pub fn two_models() {
    TWO_MODELS.store(true, Ordering::Relaxed);
}

/// A file was mapped, with experts or without.
pub fn mapped(with_experts: bool) {
    HAS_EXPERTS.fetch_or(with_experts, Ordering::Relaxed);
}

/// Whether a file with experts is mapped.
pub fn has_experts() -> bool {
    HAS_EXPERTS.load(Ordering::Relaxed)
}

/// Whether the choices of the router were read, by what came of it.
pub fn state(experts: Experts) -> Routing {
    match (has_experts(), experts.hints) {
        (false, _) => Routing::NoExperts,
        (true, 1..) => Routing::Read,
        (true, 0) if TWO_MODELS.load(Ordering::Relaxed) => Routing::TwoModels,
        (true, 0) => STATES[STATE.load(Ordering::Relaxed)],
    }
}
