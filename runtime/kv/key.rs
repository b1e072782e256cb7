//! What a block is known by: the tokens up to its end, whose they are, and the model that made the bytes.

use std::fmt;

use twox_hash::XxHash3_128;

/// A token of a model's vocabulary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct Token(u32);

impl Token {
    /// The token of this number.
    pub const fn new(number: u32) -> Self {
        Self(number)
    }
    /// Its number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// For whom blocks are kept. Tenants share nothing, unless a pool is told that they do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(u64);

impl TenantId {
    /// The tenant of this number.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }
    /// Its number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// What bytes of keys and values depend on beside the tokens: the model, the element type and the layout.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 16]);

impl Fingerprint {
    /// Of these parts, in this order. Two lists of parts that differ have different fingerprints, but for a chance of
    /// about one in 2^64 among 2^32 of them.
    pub fn of(parts: &[&[u8]]) -> Self {
        let mut hash = XxHash3_128::new();
        for part in parts {
            // So that the end of a part is not the beginning of the next.
            hash.write(&(part.len() as u64).to_le_bytes());
            hash.write(part);
        }
        Self(hash.finish_128().to_le_bytes())
    }

    /// Its bytes, as a store keeps them.
    pub const fn bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// The fingerprint that a store kept.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({:032x})", u128::from_le_bytes(self.0))
    }
}

/// A hash of all tokens up to the end of a block, of whose they are and of the model. It finds a block; whether it is
/// the right one, its tokens and the block before it say.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey([u64; 2]);

impl BlockKey {
    fn of(hash: u128) -> Self {
        Self([hash as u64, (hash >> 64) as u64])
    }

    /// The key in front of a sequence's first block. Blocks of tenants with different salts have different keys.
    pub fn root(model: &Fingerprint, salt: u64) -> Self {
        let mut hash = XxHash3_128::new();
        hash.write(model.bytes());
        hash.write(&salt.to_le_bytes());
        Self::of(hash.finish_128())
    }

    /// The key of the block with these tokens, behind the block with this key.
    pub fn next(self, tokens: &[Token]) -> Self {
        // A block has 16 to 128 tokens: small enough for the stack, and one call is faster than several.
        let mut bytes = [0; 16 + 4 * 64];
        bytes[..16].copy_from_slice(&self.to_bytes());
        match bytes.get_mut(16..16 + 4 * tokens.len()) {
            Some(room) => {
                for (place, token) in room.chunks_exact_mut(4).zip(tokens) {
                    place.copy_from_slice(&token.get().to_le_bytes());
                }
                Self::of(XxHash3_128::oneshot(&bytes[..16 + 4 * tokens.len()]))
            }
            None => {
                let mut hash = XxHash3_128::new();
                hash.write(&bytes[..16]);
                tokens.iter().for_each(|token| hash.write(&token.get().to_le_bytes()));
                Self::of(hash.finish_128())
            }
        }
    }

    /// Its bytes, as a store keeps them.
    pub fn to_bytes(self) -> [u8; 16] {
        (u128::from(self.0[1]) << 64 | u128::from(self.0[0])).to_le_bytes()
    }

    /// The key that a store kept.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        let hash = u128::from_le_bytes(bytes);
        Self([hash as u64, (hash >> 64) as u64])
    }

    /// Bits of it, for a table.
    pub(crate) const fn short(self) -> u64 {
        self.0[0]
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockKey({:016x}{:016x})", self.0[1], self.0[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(from: u32, count: u32) -> Vec<Token> {
        (from..from + count).map(Token::new).collect()
    }

    #[test]
    fn keys_follow_from_all_that_comes_before() {
        let model = Fingerprint::of(&[b"model", b"f16"]);
        assert_ne!(model, Fingerprint::of(&[b"modelf", b"16"]));
        assert_eq!(Fingerprint::from_bytes(*model.bytes()), model);
        let root = BlockKey::root(&model, 0);
        assert_ne!(root, BlockKey::root(&model, 1));
        let [one, two] = [root.next(&tokens(0, 16)), root.next(&tokens(1, 16))];
        assert_ne!(one, two);
        assert_ne!(one.next(&tokens(0, 16)), two.next(&tokens(0, 16)));
        assert_eq!(BlockKey::from_bytes(one.to_bytes()), one);
    }

    /// A hash of one call and one of many agree.
    #[test]
    fn long_blocks_have_keys_like_short_ones() {
        let root = BlockKey::root(&Fingerprint::of(&[]), 7);
        for count in [1, 16, 63, 64, 65, 500] {
            let tokens = tokens(9, count);
            let mut hash = XxHash3_128::new();
            hash.write(&root.to_bytes());
            tokens.iter().for_each(|token| hash.write(&token.get().to_le_bytes()));
            assert_eq!(root.next(&tokens), BlockKey::of(hash.finish_128()), "{count} tokens");
        }
    }
}
