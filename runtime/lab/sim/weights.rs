//! What a model's weights take, by what they are for.

use serde::{Deserialize, Serialize};

use super::TensorClass;
use crate::format::ModelHeader;

/// Weights of one class.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassBytes {
    /// [In words](TensorClass::name).
    pub class: String,
    /// Their bytes in the model's files.
    pub bytes: u64,
}

impl ClassBytes {
    /// The weights of a model: its classes of tensors, those that there are.
    pub fn of_model(model: &ModelHeader) -> Vec<Self> {
        let mut bytes = [0_u64; TensorClass::ALL.len()];
        for tensor in &model.tensors {
            bytes[TensorClass::of(&tensor.name) as usize] += tensor.len;
        }
        let all = TensorClass::ALL.into_iter().zip(bytes).filter(|(_, bytes)| *bytes > 0);
        all.map(|(class, bytes)| Self::new(class, bytes)).collect()
    }

    /// So many bytes of a class.
    pub fn new(class: TensorClass, bytes: u64) -> Self {
        Self { class: class.name().to_owned(), bytes }
    }
}
