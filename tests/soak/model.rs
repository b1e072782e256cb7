//! What the bytes of every tensor must be: sums of words, which follow each stamp by arithmetic alone.
//!
//! A word counts in the sum by its place. A stamp makes `word * factor + stamp + place * STEP` of each word of a part,
//! so the part's new sum is `sum * factor + stamp * W + V`, where `W` is the sum of the weights, and `V` that of the
//! weights times `place * STEP`. So the model keeps one sum a part, however large the part is, and it depends on every
//! stamp that the part ever got: one that is lost, comes twice or comes out of turn shows in all later sums.

use outcore::Tensor;
use parking_lot::Mutex;

/// How much the stamped word grows with its place.
const STEP: u64 = 0xD134_2543_DE82_EF95;

/// How much a word counts, by its place. Odd, so no bit of a word is lost.
pub fn weight(place: u64) -> u64 {
    let mut z = place.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z ^= z >> 29;
    z.wrapping_mul(0xBF58_476D_1CE4_E5B9) | 1
}

/// The weighted sum of words, the first of which has the place `first`.
pub fn sum_of(first: u64, words: impl IntoIterator<Item = u64>) -> u64 {
    let places = first..;
    words.into_iter().zip(places).fold(0, |sum, (word, place)| sum.wrapping_add(word.wrapping_mul(weight(place))))
}

/// The same of little-endian bytes.
pub fn sum_of_bytes(first: u64, bytes: &[u8]) -> u64 {
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0_u64, |word, byte| word << 8 | u64::from(*byte));
    sum_of(first, bytes.chunks(8).map(word))
}

/// What a stamp does to a word.
pub fn stamped(word: u64, place: u64, factor: u64, stamp: u64) -> u64 {
    word.wrapping_mul(factor).wrapping_add(stamp).wrapping_add(place.wrapping_mul(STEP))
}

/// A stamp.
#[derive(Clone, Copy, Debug)]
pub struct Stamp {
    /// By how much the old words are multiplied; 0 leaves nothing of them.
    pub factor: u64,
    /// What is added.
    pub stamp: u64,
}

/// A part of a tensor that is stamped as a whole.
#[derive(Debug)]
struct Part {
    first: u64,
    words: u64,
    /// Of its weights.
    weights: u64,
    /// Of its weights times what a stamp adds by place.
    steps: u64,
    sum: u64,
    stamps: u64,
}

impl Part {
    /// A part of zeros.
    fn new(first: u64, words: u64) -> Self {
        let places = first..first + words;
        let weights = places.clone().fold(0, |sum: u64, place| sum.wrapping_add(weight(place)));
        let steps = sum_of(first, places.map(|place| place.wrapping_mul(STEP)));
        Self { first, words, weights, steps, sum: 0, stamps: 0 }
    }

    fn apply(&mut self, Stamp { factor, stamp }: Stamp) {
        let added = stamp.wrapping_mul(self.weights).wrapping_add(self.steps);
        self.sum = self.sum.wrapping_mul(factor).wrapping_add(added);
        self.stamps += 1;
    }
}

#[derive(Debug)]
enum Bytes {
    /// Of a file, with this sum.
    Given(u64),
    /// Written by stamps. The lock is held for moments only. What orders reads and writes of it is the pins: whoever
    /// asks or changes it has the tensor pinned, for writing if it changes it.
    Stamped(Mutex<Vec<Part>>),
}

/// A tensor, and what is in it.
#[derive(Debug)]
pub struct Unit {
    pub name: String,
    pub tensor: Tensor,
    pub words: u64,
    bytes: Bytes,
}

impl Unit {
    /// A tensor of a file, whose bytes have this sum.
    pub fn given(name: String, tensor: Tensor, sum: u64) -> Self {
        let words = tensor.size().get() / 8;
        Self { name, tensor, words, bytes: Bytes::Given(sum) }
    }

    /// A new tensor, all zeros, that is stamped in halves.
    pub fn zeros(name: String, tensor: Tensor) -> Self {
        let words = tensor.size().get() / 8;
        let half = words / 2;
        let parts = vec![Part::new(0, half), Part::new(half, words - half)];
        Self { name, tensor, words, bytes: Bytes::Stamped(Mutex::new(parts)) }
    }

    /// The sum that its bytes have, for a caller who has it pinned; and how many stamps that includes.
    pub fn sum(&self) -> (u64, u64) {
        match &self.bytes {
            Bytes::Given(sum) => (*sum, 0),
            Bytes::Stamped(parts) => parts
                .lock()
                .iter()
                .fold((0, 0), |(sum, stamps), part| (sum.wrapping_add(part.sum), stamps + part.stamps)),
        }
    }

    /// The words of the `half`th half: the first and how many.
    pub fn half(&self, half: usize) -> (u64, u64) {
        match &self.bytes {
            Bytes::Given(_) => (0, self.words),
            Bytes::Stamped(parts) => parts.lock().get(half).map_or((0, 0), |part| (part.first, part.words)),
        }
    }

    /// Notes that the `half`th half has words with this sum, for a caller who has the tensor pinned for writing.
    pub fn replace(&self, half: usize, sum: u64) {
        if let Bytes::Stamped(parts) = &self.bytes
            && let Some(part) = parts.lock().get_mut(half)
        {
            part.sum = sum;
            part.stamps += 1;
        }
    }

    /// Notes a stamp of the `half`th half, for a caller who has the tensor pinned for writing.
    pub fn apply(&self, half: usize, stamp: Stamp) {
        if let Bytes::Stamped(parts) = &self.bytes
            && let Some(part) = parts.lock().get_mut(half)
        {
            part.apply(stamp);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The model's arithmetic against words that are really stamped.
    #[test]
    fn sums_follow_stamps() {
        let (first, count) = (37, 100);
        let mut part = Part::new(first, count);
        let mut words = vec![0_u64; count as usize];
        for n in 0..20_u64 {
            let stamp = Stamp { factor: if n % 3 == 0 { 0 } else { n * 8 + 5 }, stamp: weight(n) };
            for (word, place) in words.iter_mut().zip(first..) {
                *word = stamped(*word, place, stamp.factor, stamp.stamp);
            }
            part.apply(stamp);
            assert_eq!(part.sum, sum_of(first, words.iter().copied()), "stamp {n}");
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(part.sum, sum_of_bytes(first, &bytes));
        words.swap(3, 90);
        assert_ne!(part.sum, sum_of(first, words), "words have changed places");
    }
}
