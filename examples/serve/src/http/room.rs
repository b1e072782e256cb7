//! Room in memory for what requests hold: it is a part of `--memory`, and no request takes more without asking here.
//!
//! One half is for what stays: bodies, what was parsed, tokens, logprobs. Nobody waits for that: where there is none, a
//! request is refused. The other half is for turning prompts into tokens. For that requests wait in line, and whoever
//! has it gives it back without waiting for anything. So no two requests wait for each other.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;

/// Bytes that requests may hold, all together.
#[derive(Debug)]
pub struct Room {
    staying: Half,
    encoding: Half,
}

#[derive(Clone, Debug)]
struct Half {
    free: Arc<Semaphore>,
    bytes: usize,
}

/// Bytes of one half, until this is dropped.
#[derive(Debug)]
pub struct Hold {
    half: Half,
    taken: Option<OwnedSemaphorePermit>,
}

impl Room {
    /// Room of so many bytes in all.
    pub fn new(bytes: usize) -> Self {
        // Permits are taken by numbers of 32 bits.
        let bytes = (bytes / 2).min(u32::MAX as usize).min(Semaphore::MAX_PERMITS);
        let half = || Half { free: Arc::new(Semaphore::new(bytes)), bytes };
        Self { staying: half(), encoding: half() }
    }

    /// The most bytes that one request may hold.
    pub fn staying_most(&self) -> usize {
        self.staying.bytes
    }

    /// The most bytes that turning one prompt into tokens may take.
    pub fn encoding_most(&self) -> usize {
        self.encoding.bytes
    }

    /// Bytes that nobody holds.
    pub fn free(&self) -> usize {
        self.staying.free.available_permits() + self.encoding.free.available_permits()
    }

    /// For what stays; nothing yet.
    pub fn staying(&self) -> Hold {
        Hold { half: self.staying.clone(), taken: None }
    }

    /// Waits for so many bytes, of [at most](Self::encoding_most) all, to turn prompts into tokens. Who came first gets
    /// them first.
    ///
    /// # Errors
    /// 400 for more than all.
    pub async fn encoding(&self, bytes: usize) -> Result<Hold, ApiError> {
        let half = self.encoding.clone();
        let permits = half.permits(bytes)?;
        let taken = half.free.clone().acquire_many_owned(permits).await;
        let taken = taken.map_err(|_| ApiError::internal("The server takes no more prompts."))?;
        Ok(Hold { half, taken: Some(taken) })
    }
}

impl Half {
    fn permits(&self, bytes: usize) -> Result<u32, ApiError> {
        u32::try_from(bytes).ok().filter(|_| bytes <= self.bytes).ok_or_else(|| {
            ApiError::invalid(format!(
                "This request would take {bytes} bytes of memory, and the server has {} for one: ask for less of it, or \
                 start it with more --memory.",
                self.bytes
            ))
        })
    }
}

impl Hold {
    /// How many bytes it has.
    pub fn bytes(&self) -> usize {
        self.taken.as_ref().map_or(0, OwnedSemaphorePermit::num_permits)
    }

    /// Takes more, or gives some back, so that it has so many bytes.
    ///
    /// # Errors
    /// 503 if there are not so many now, 400 if there never are; then it has what it had.
    pub fn set(&mut self, bytes: usize) -> Result<(), ApiError> {
        let wanted = self.half.permits(bytes)? as usize;
        let has = self.bytes();
        if wanted <= has {
            drop(self.taken.as_mut().and_then(|taken| taken.split(has - wanted)));
            return Ok(());
        }
        let Ok(more) = self.half.free.clone().try_acquire_many_owned((wanted - has) as u32) else {
            let message = "The server has no room for this request now. Try again.";
            return Err(ApiError::unavailable(message, Some(Duration::from_secs(1))));
        };
        match &mut self.taken {
            Some(taken) => taken.merge(more),
            none => *none = Some(more),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::future::Future;
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn what_is_held_is_exact_and_comes_back() {
        let room = Room::new(2000);
        let free = || room.staying.free.available_permits();
        let mut first = room.staying();
        first.set(700).unwrap();
        let mut second = room.staying();
        second.set(200).unwrap();
        let refused = second.set(301).unwrap_err();
        assert_eq!((refused.status, refused.retry_after.is_some(), free()), (503, true, 100));
        second.set(300).unwrap();
        first.set(100).unwrap();
        assert_eq!(free(), 600);
        drop(second);
        assert_eq!(first.set(1001).unwrap_err().status, 400);
        first.set(1000).unwrap();
        assert_eq!(free(), 0);
        drop(first);
        assert_eq!(free(), 1000);
    }

    /// Two that hold all that may stay, and want to go on.
    #[test]
    fn who_waits_for_encoding_is_held_up_only_by_who_encodes() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let room = Room::new(2000);
            let mut holds = [room.staying(), room.staying()];
            holds.iter_mut().for_each(|hold| hold.set(500).unwrap());
            let first = room.encoding(1000).await.unwrap();
            let mut waiting = Box::pin(room.encoding(1000));
            assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            drop(first);
            assert!(waiting.await.is_ok());
            assert_eq!(room.encoding(1001).await.unwrap_err().status, 400);
        });
    }
}
