//! How long a pass or a step computes, from its operations and the bytes that it reads and writes.

use super::memory::{Checkpointing, Job, Memory, Work};
use crate::sim::ComputeModel;

/// How the compute time is known.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Compute {
    /// Seconds of a pass or a step that waits for nothing: measured, or from elsewhere.
    Seconds(f64),
    /// The machine that computes. The pass takes as long as its [operations](Job::flops) or its [bytes](Job::traffic)
    /// at the machine's rates, whichever is longer. No kernel is faster, and most are slower.
    Roofline(ComputeModel),
}

impl Compute {
    /// Seconds of a pass or a step of `job` with everything resident. If only the machine's memory bandwidth is known,
    /// a pass of inference takes what its bytes take, and training is `None`: bandwidth does not tell its time.
    pub fn seconds(&self, job: &Job, memory: &Memory) -> Option<f64> {
        match self {
            Self::Seconds(seconds) => Some(*seconds),
            Self::Roofline(machine) => {
                let bytes = job.traffic(memory);
                let found = machine.roofline_s(bytes, job.flops());
                match job.work {
                    Work::Infer { .. } => found.or_else(|| machine.roofline_s(bytes, 0.0)),
                    Work::Train { .. } => found,
                }
            }
        }
    }

    /// The bound of the compute time, if known: `memory` or `operations`.
    pub fn bound_by(&self, job: &Job, memory: &Memory) -> Option<&'static str> {
        let (Self::Roofline(machine), Some(seconds)) = (self, self.seconds(job, memory)) else { return None };
        let reading = machine.roofline_s(job.traffic(memory), 0.0)?;
        Some(if seconds > reading { "operations" } else { "memory" })
    }
}

impl Job {
    /// Tokens of a pass or a step, of all sequences together.
    pub fn tokens(&self) -> u64 {
        match self.work {
            Work::Infer { .. } => self.batch,
            Work::Train { .. } => self.batch.saturating_mul(self.context),
        }
    }

    /// Floating-point operations of a pass or a step.
    ///
    /// A token takes 2 operations for each parameter that it uses (Kaplan et al. 2020, section 2.1), and in each layer
    /// `2 s a (dk + dv)` for attention: scores and weighted sums against `s` tokens, including masked ones (Chowdhery
    /// et al. 2022, "PaLM", appendix B: `12 L H Q T` a token in training, where `dk = dv = Q`). The backward pass takes
    /// twice as much as the forward pass. Recomputation adds one more forward pass: of everything if it is full, of
    /// attention if it is selective.
    pub fn flops(&self) -> f64 {
        let shape = &self.shape;
        let linear = 2.0 * shape.active_parameters();
        let heads = 2.0 * shape.layers as f64 * shape.heads as f64;
        let attention = heads * (shape.key_dim as f64 + shape.value_dim as f64) * self.context as f64;
        let forward = linear + attention;
        let token = match self.work {
            Work::Infer { .. } => forward,
            Work::Train { checkpointing, .. } => {
                let again = match checkpointing {
                    Checkpointing::None => 0.0,
                    Checkpointing::Selective => attention,
                    Checkpointing::Full | Checkpointing::Layers => forward,
                };
                3.0 * forward + again
            }
        };
        token * self.tokens() as f64
    }

    /// Bytes that a pass or a step reads and writes in the device's memory. At inference: the weights that it uses and
    /// all keys and values, read once. In training: weights are read three times (forward, backward, update) and
    /// written once; gradients are read twice and written once; the optimizer's state and activations are read once and
    /// written once.
    pub fn traffic(&self, memory: &Memory) -> f64 {
        let bytes = |class: crate::ids::Bytes| class.get() as f64;
        match self.work {
            Work::Infer { .. } => self.shape.used_by(self.tokens()) + bytes(memory.kv),
            Work::Train { .. } => {
                4.0 * bytes(memory.weights)
                    + 3.0 * bytes(memory.gradients)
                    + 2.0 * bytes(memory.optimizer)
                    + 2.0 * bytes(memory.activations)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::estimate::Given;
    use super::super::memory::{KvType, Optimizer};
    use super::super::shape::Shape;
    use super::*;
    use crate::ids::Bytes;
    use crate::sim::MachineModel;
    use outcore::DType;

    fn gpt_3(work: Work) -> Job {
        let given = Given {
            parameters: "175B".parse().unwrap(),
            dtype: DType::BF16,
            layers: Some(96),
            hidden: Some(12_288),
            heads: Some(96),
            kv_heads: Some(96),
            ffn: Some(49_152),
            vocab: Some(50_257),
            gated: false,
            experts: None,
        };
        Job { shape: Shape::estimate(&given).unwrap(), work, context: 2048, batch: 1, headroom_percent: 20 }
    }

    fn train(checkpointing: Checkpointing) -> Work {
        Work::Train { optimizer: Optimizer::AdamMixed, checkpointing }
    }

    fn near(found: f64, wanted: f64) {
        assert!((found / wanted - 1.0).abs() < 1e-9, "{found} {wanted}");
    }

    #[test]
    fn operations_are_those_of_the_papers() {
        let (p, s) = (175e9, 2048.0);
        // Chowdhery et al., appendix B: 6N + 12 L H Q T a token.
        let attention = 12.0 * 96.0 * 12_288.0 * s;
        near(gpt_3(train(Checkpointing::None)).flops(), s * (6.0 * p + attention));
        // A forward pass more adds a third to everything; with selective recomputation, to attention only.
        near(gpt_3(train(Checkpointing::Full)).flops(), s * (6.0 * p + attention) * 4.0 / 3.0);
        near(gpt_3(train(Checkpointing::Selective)).flops(), s * (6.0 * p + attention * 4.0 / 3.0));
        let mut infer = gpt_3(Work::Infer { kv: KvType::F16 });
        infer.batch = 3;
        near(infer.flops(), 3.0 * (2.0 * p + attention / 3.0));
        // Brown et al. 2020, table D.1: 3.14e23 operations for 300 billion tokens, without attention.
        let tokens = 300e9 / s;
        let all = gpt_3(train(Checkpointing::None)).flops() * tokens;
        assert!((3.14e23..3.3e23).contains(&all), "{all}");
    }

    #[test]
    fn experts_that_are_not_drawn_take_no_operations_and_no_bytes() {
        let shape = Shape::estimate(&Given::mixtral(2).unwrap()).unwrap();
        // Jiang et al. 2024, "Mixtral of Experts": a token uses 13 of 47 billion parameters.
        assert!((12.7e9..13.1e9).contains(&shape.active_parameters()), "{}", shape.active_parameters());
        let mut job = Job { shape, work: Work::Infer { kv: KvType::F16 }, context: 1, batch: 1, headroom_percent: 20 };
        let memory = job.memory(true).unwrap();
        assert_eq!(memory.weights, Bytes::new(93_400_000_000), "memory holds them all");
        near(job.traffic(&memory), 2.0 * job.shape.active_parameters() + memory.kv.get() as f64);
        // Eight sequences draw nine tenths of the experts, and each sequence has its own operations.
        job.batch = 8;
        let experts = job.shape.experts.unwrap();
        let drawn = 1.0 - 0.75f64.powi(8);
        let rest = 93.4e9 - experts.weights.get() as f64;
        let memory = job.memory(true).unwrap();
        near(job.traffic(&memory), rest + drawn * experts.weights.get() as f64 + memory.kv.get() as f64);
    }

    #[test]
    fn a_pass_takes_what_its_bytes_or_its_operations_take() {
        let machine = MachineModel::named("h200").unwrap().compute;
        let roofline = Compute::Roofline(machine);
        let seconds = |job: &Job| roofline.seconds(job, &job.memory(true).unwrap()).unwrap();
        let mut job = gpt_3(Work::Infer { kv: KvType::F16 });
        let memory = job.memory(true).unwrap();
        near(seconds(&job), (350e9 + memory.kv.get() as f64) / 4.8e12);
        (job.batch, job.context) = (1000, 1);
        near(seconds(&job), job.flops() / 989e12);
        let job = gpt_3(train(Checkpointing::Full));
        near(seconds(&job), job.flops() / 989e12);

        let unknown = Compute::Roofline(crate::sim::ComputeModel { flops: None, ..machine });
        assert_eq!(unknown.seconds(&job, &job.memory(true).unwrap()), None);
        let job = gpt_3(Work::Infer { kv: KvType::F16 });
        near(unknown.seconds(&job, &memory).unwrap(), seconds(&job));
        assert_eq!(Compute::Seconds(0.25).seconds(&job, &memory), Some(0.25));
    }
}
