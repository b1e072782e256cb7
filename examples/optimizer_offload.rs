//! An optimizer whose state does not fit the memory, durable after every step: `cargo run --release --example
//! optimizer_offload`. Run it again, or kill it and run it again: it goes on from the last step that was committed.
//!
//! The model is a line of least squares for each parameter: its gradient is the distance to a target. A program of your
//! own computes gradients instead.

use outcore::durable::DurableOptions;
use outcore::{Bytes, DType, PolicyKind, Result, Runtime};
use outcore_train::{AdamW, Group, Optimizer, Schedule};

const ROWS: u64 = 4096;
const COLUMNS: u64 = 2048;
const LAYERS: u64 = 4;
const STEPS: u64 = 5;

fn main() -> Result<()> {
    let runtime = Runtime::builder().device_budget(Bytes::mib(128)).policy(PolicyKind::Plan).open()?;
    let folder = std::env::args().nth(1).unwrap_or_else(|| "optimizer-state".into());
    let state = runtime.open_durable(&folder, DurableOptions::default())?;

    let mut group = Group::new(AdamW::default(), Schedule::constant(0.1));
    for layer in 0..LAYERS {
        group = group.parameter(format!("layer.{layer}.weight"), &[ROWS, COLUMNS]);
    }
    let mut optimizer = Optimizer::builder(&runtime).group(group).gradients(DType::BF16).clip(1e6).open_in(&state)?;
    let parameters = LAYERS * ROWS * COLUMNS;
    println!("{parameters} parameters, {} MB of state, 128 MiB of memory", parameters * 14 / 1_000_000);
    println!("{} steps were made before; the state is in {folder}", optimizer.steps());

    for _ in 0..STEPS {
        let mut loss = 0.0;
        for layer in 0..LAYERS {
            let name = format!("layer.{layer}.weight");
            let weight = optimizer.parameter(&name)?;
            // Some rows at a time, so that no more than these are needed at once.
            for first in (0..ROWS).step_by(256) {
                let rows = weight.rows(first..first + 256)?;
                let gradients = distances(runtime.pin(&rows).wait()?.view::<f32>()?, layer, &mut loss);
                optimizer.accumulate(&name, first * COLUMNS, &gradients, 1.0)?;
            }
        }
        let step = optimizer.step(1.0)?;
        let generation = optimizer.commit(&serde_json::json!({ "loss": loss }))?;
        let loss = loss / parameters as f64;
        println!("step {}: loss {loss:.4}, norm {:.1}, durable as generation {generation}", step.number, step.norm);
    }
    drop((optimizer, state));
    runtime.close()
}

/// How far each parameter is from its layer's target, and half the squares of that as the loss.
fn distances(parameters: &[f32], layer: u64, loss: &mut f64) -> Vec<f32> {
    let distances: Vec<f32> = parameters.iter().map(|parameter| parameter - (layer + 1) as f32).collect();
    *loss += distances.iter().map(|distance| f64::from(*distance) * f64::from(*distance) / 2.0).sum::<f64>();
    distances
}
