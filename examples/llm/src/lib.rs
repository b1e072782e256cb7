//! Llama-family models over paged weights.
