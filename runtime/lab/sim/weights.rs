//! Bytes of a model's weights by class.

use serde::{Deserialize, Serialize};

use super::TensorClass;
use crate::format::ModelHeader;

/// The bytes of one class of weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassBytes {
    /// The class's [name](TensorClass::name).
    pub class: String,
    /// Bytes in the model's files.
    pub bytes: u64,
}

impl ClassBytes {
    /// Returns the bytes of each class of tensors that the model has.
    pub fn of_model(model: &ModelHeader) -> Vec<Self> {
        let mut bytes = [0_u64; TensorClass::ALL.len()];
        for tensor in &model.tensors {
            bytes[TensorClass::of(&tensor.name) as usize] += tensor.len;
        }
        let all = TensorClass::ALL.into_iter().zip(bytes).filter(|(_, bytes)| *bytes > 0);
        all.map(|(class, bytes)| Self::new(class, bytes)).collect()
    }

    /// Makes the entry of a class with its bytes.
    pub fn new(class: TensorClass, bytes: u64) -> Self {
        Self { class: class.name().to_owned(), bytes }
    }
}
