//! Moves in chunks: a page between the disk and a device that the store does not reach, through a staging buffer.
//!
//! Such a page crosses the disk's queue and the link. As one operation each, the link would have nothing to do while
//! the page is read, and the disk nothing while it is copied. So a page of more than [`CHUNK`](crate::store::CHUNK)
//! moves in chunks. Each has two operations, one after the other: a fill reads and then copies up, a write back copies
//! down and then writes. Chunks do not wait for each other, so disk, staging buffer and link work at the same time on
//! parts of one page. To the pager it is one move.
//!
//! # Invariants
//!
//! 1. All first operations are submitted when the move starts, in the order of the page's bytes. The store takes what
//!    was submitted first, so an earlier page still comes before a later one.
//! 2. The move ends once, when none of its operations is in flight. After the first failure no second operation is
//!    submitted, and the move fails with that error. Of a write back that fails, a part may be in the page's place on
//!    disk: the page stays dirty, or is poisoned, so nobody reads it there.
//! 3. The second operation of the chunk that ends its first one last is submitted after the whole page was checked. So
//!    all bytes are checked when the last copy of a fill is taken up.
//! 4. Of a write back either every write waits for a [wipe](super::wipe) of its page, or none does.

use std::time::Instant;

use super::{Engine, FillPoint, InFlight, Move, MoveId, Own, SegmentIo, Stage};
use crate::device::{EventId, StreamOp, Token};
use crate::error::{Error, ErrorKind, Result};
use crate::observe::Resource;
use crate::pager::Place;
use crate::store::{IO_ALIGNMENT, IoKind, IoOp};

/// Marks the tokens of chunks.
const CHUNK_TOKENS: u64 = 1 << 62;
/// Bits of a token that count the chunks of a page.
const COUNT_BITS: u32 = 10;
/// Bits of a token that hold a move's place among those in flight. Between them and the mark are those of its serial.
const PLACE_BITS: u32 = 20;
/// Operations whose ends may be reported together, before any of them is looked at.
const TOGETHER: usize = 8;

/// Whether tokens can name the chunks of a move: of all but the last of more than a million in flight.
fn can_name(id: MoveId) -> bool {
    id.parts().0 < 1 << PLACE_BITS
}

/// The token of a move's chunk.
fn token_of(id: MoveId, chunk: usize) -> Token {
    let (place, serial) = id.parts();
    let id = u64::from(serial) << PLACE_BITS | u64::from(place);
    Token(CHUNK_TOKENS | id << COUNT_BITS | chunk as u64)
}

/// The move and the number of the chunk that a token of a move's operation names.
fn chunk_of(token: Token) -> Option<(MoveId, usize)> {
    if token.0 & CHUNK_TOKENS == 0 {
        return None;
    }
    let field = |from: u32, bits: u32| (token.0 >> from & ((1 << bits) - 1)) as u32;
    let place = field(COUNT_BITS, PLACE_BITS);
    let serial = field(COUNT_BITS + PLACE_BITS, CHUNK_TOKENS.ilog2() - COUNT_BITS - PLACE_BITS);
    Some((MoveId::of(place, serial), field(0, COUNT_BITS) as usize))
}

/// The move whose operation has this token.
pub(super) fn move_of(token: Token) -> MoveId {
    chunk_of(token).map_or(MoveId::new(token.0), |(id, _)| id)
}

/// Whether a token names a chunk of a move.
pub(super) fn is_chunk(token: Token) -> bool {
    chunk_of(token).is_some()
}

/// What follows the end of an operation.
#[derive(Debug)]
enum Step {
    /// Other operations of the move are in flight.
    Nothing,
    /// The chunk's second operation is to be submitted. `last` if every first one has ended.
    Second { last: bool },
    /// The move has ended.
    Ended(Result<()>),
}

#[derive(Debug)]
struct Chunk {
    /// When its operation was submitted.
    since: Instant,
    /// Whether that is the second one.
    second: bool,
    /// Whether the device has taken up its copy.
    taken: bool,
}

/// How far a move in chunks is.
#[derive(Debug)]
pub(super) struct Chunks {
    chunks: Vec<Chunk>,
    /// Chunks with an operation in flight, or between two.
    left: usize,
    /// First operations that have not ended.
    firsts: usize,
    not_taken: usize,
    /// The latest of the points behind copies that were taken up.
    point: FillPoint,
    error: Option<Error>,
}

impl Chunks {
    fn new(count: usize) -> Self {
        let since = Instant::now();
        let chunks = (0..count).map(|_| Chunk { since, second: false, taken: false }).collect();
        Self { chunks, left: count, firsts: count, not_taken: count, point: FillPoint::new(0), error: None }
    }

    /// Whether the operation in flight of a chunk is its second, and when it was submitted.
    fn operation(&self, chunk: usize) -> Option<(bool, Instant)> {
        self.chunks.get(chunk).map(|chunk| (chunk.second, chunk.since))
    }

    /// Whether this operation, which has just ended or is about to, may be the last that keeps the page from being
    /// hashed: others may have ended together with it.
    fn may_be_last(&self, fills: bool) -> bool {
        if fills { self.firsts <= TOGETHER } else { self.firsts == 0 && self.left <= TOGETHER }
    }

    /// The operation of a chunk has ended.
    fn ended(&mut self, chunk: usize, result: Result<()>) -> Step {
        let first = self.chunks.get(chunk).is_some_and(|chunk| !chunk.second);
        if first {
            self.firsts -= 1;
        }
        match result {
            Ok(()) if first && self.error.is_none() => Step::Second { last: self.firsts == 0 },
            Ok(()) => self.leave(),
            Err(error) => self.fail(error),
        }
    }

    /// A chunk's operation failed, or its second one cannot be made.
    fn fail(&mut self, error: Error) -> Step {
        self.error.get_or_insert(error);
        self.leave()
    }

    /// A chunk has no operation any more.
    fn leave(&mut self) -> Step {
        self.left -= 1;
        match self.left {
            0 => Step::Ended(self.error.take().map_or(Ok(()), Err)),
            _ => Step::Nothing,
        }
    }

    /// The second operation of a chunk is about to be submitted; not if the move has failed meanwhile.
    fn begin_second(&mut self, chunk: usize, since: Instant) -> Option<Step> {
        if self.error.is_some() {
            return Some(self.leave());
        }
        if let Some(chunk) = self.chunks.get_mut(chunk) {
            (chunk.second, chunk.since) = (true, since);
        }
        None
    }

    /// The device has taken up the copy of a chunk. Once it has taken up all of them, returns the point behind the
    /// last.
    fn taken(&mut self, chunk: usize, point: FillPoint) -> Option<FillPoint> {
        let taken = &mut self.chunks.get_mut(chunk)?.taken;
        if !std::mem::replace(taken, true) {
            self.not_taken -= 1;
            self.point = self.point.max(point);
        }
        (self.not_taken == 0).then_some(self.point)
    }
}

/// A part of a page: its first byte, and its length.
#[derive(Clone, Copy, Debug)]
struct Part {
    at: u64,
    len: u64,
}

impl Engine {
    /// Bytes of a chunk.
    fn chunk_bytes(&self) -> u64 {
        // No more chunks than the bits of a token can number.
        self.chunk.get().max(self.page_bytes >> COUNT_BITS).next_multiple_of(IO_ALIGNMENT)
    }

    /// How many chunks a page of `bytes` has.
    fn chunks_in(&self, bytes: u64) -> usize {
        bytes.div_ceil(self.chunk_bytes()) as usize
    }

    /// The part of the page that chunk `chunk` of `count` has. The last one has all that is left.
    fn part(&self, chunk: usize, count: usize) -> Part {
        let at = chunk as u64 * self.chunk_bytes();
        let end = if chunk + 1 == count { self.page_bytes } else { at + self.chunk_bytes() };
        Part { at, len: end.saturating_sub(at) }
    }

    /// Starts a move in chunks, unless it is not one. Nothing was submitted if it fails.
    pub(super) fn start_in_chunks(&self, planned: Move, io: &SegmentIo, own: &mut Own) -> Result<bool> {
        let fills = match (planned.from, planned.to, planned.staging) {
            (Place::Disk, Place::Device(_), Some(_)) => true,
            (Place::Device(_), Place::Disk, Some(_)) => false,
            _ => return Ok(false),
        };
        if self.chunks_in(self.page_bytes) < 2 || !can_name(planned.id) {
            return Ok(false);
        }
        let address = self.bytes_at(planned, self.address(io, planned.page))?;
        let buffer = self.io_buffer(planned, address)?;
        let kind = if fills { IoKind::Read } else { IoKind::Write };
        let whole = self.operation(planned, kind, io, buffer)?;
        let count = self.chunks_in(whole.valid.into());
        if count < 2 {
            return Ok(false);
        }
        let stage = if fills { Stage::Reading } else { Stage::CopyingOut };
        let begin = || {
            self.chunks.lock().insert(planned.id, Chunks::new(count));
            self.in_flight.lock().insert(planned.id, InFlight { planned, stage, since: Instant::now() });
            for _ in 0..count {
                self.observer.begin(if fills { Resource::DiskRead } else { Resource::LinkOut });
            }
        };
        if fills {
            begin();
            for chunk in 0..count {
                self.submit_read(self.chunk_op(&whole, chunk, count), own);
            }
        } else {
            begin();
            for chunk in 0..count {
                let Part { at, len } = self.part(chunk, count);
                let op = StreamOp::CopyOut { device: address.offset(at), host: buffer.offset(at), len };
                self.device.submit(self.write_backs, op, Some(token_of(planned.id, chunk)));
            }
        }
        Ok(true)
    }

    /// The part of a page's operation of the store that one chunk has.
    fn chunk_op(&self, whole: &IoOp, chunk: usize, count: usize) -> IoOp {
        let Part { at, len } = self.part(chunk, count);
        let valid = len.min(u64::from(whole.valid) - at.min(whole.valid.into()));
        IoOp {
            token: token_of(move_of(whole.token), chunk),
            kind: whole.kind,
            file: whole.file,
            offset: whole.offset + at,
            buffer: whole.buffer.offset(at),
            len: valid.next_multiple_of(IO_ALIGNMENT) as u32,
            valid: valid as u32,
            priority: whole.priority,
        }
    }

    /// The tokens that operations of a move may have.
    pub(super) fn tokens_of(&self, id: MoveId) -> Vec<Token> {
        match self.chunks.lock().get(&id) {
            Some(chunks) => (0..chunks.chunks.len()).map(|chunk| token_of(id, chunk)).collect(),
            None => vec![Token(id.get())],
        }
    }

    /// Whether completing this operation of the store means hashing the page, if anything does.
    pub(super) fn may_hash(&self, token: Token, fills: bool) -> bool {
        let Some((id, _)) = chunk_of(token) else { return true };
        self.chunks.lock().get(&id).is_some_and(|chunks| chunks.may_be_last(fills))
    }

    /// The device has taken up the copy of a chunk. Once it has taken up all of the move, returns the point behind
    /// them.
    pub(super) fn chunk_taken(&self, token: Token, end: EventId) -> Option<FillPoint> {
        let (id, chunk) = chunk_of(token)?;
        self.chunks.lock().get_mut(&id)?.taken(chunk, FillPoint::new(end.0))
    }

    /// Goes on after the end of a chunk's operation. Adds to `taken` a fill of which the device has taken up all
    /// copies, and to `ended` a move that has ended.
    pub(super) fn chunk_ended(
        &self,
        token: Token,
        result: Result<()>,
        taken: &mut Vec<(MoveId, FillPoint)>,
        ended: &mut Vec<(Move, Result<()>)>,
    ) {
        let Some((id, chunk)) = chunk_of(token) else { return };
        let Some(entry) = self.in_flight.lock().get(&id).copied() else { return };
        let fills = matches!(entry.planned.to, Place::Device(_));
        let (operation, count, step) = {
            let mut all = self.chunks.lock();
            let Some(chunks) = all.get_mut(&id) else { return };
            let operation = chunks.operation(chunk);
            (operation, chunks.chunks.len(), chunks.ended(chunk, result.clone()))
        };
        if let Some((second, since)) = operation {
            let resource = match (fills, second) {
                (true, false) => Resource::DiskRead,
                (true, true) => Resource::LinkIn,
                (false, false) => Resource::LinkOut,
                (false, true) => Resource::DiskWrite,
            };
            let Part { at, len } = self.part(chunk, count);
            let len = match self.segment_io(entry.planned.page.segment) {
                Ok(io) if resource == Resource::DiskRead => {
                    len.min(self.valid(&io, entry.planned.page).saturating_sub(at))
                }
                _ => len,
            };
            let bytes = if result.is_ok() { len } else { 0 };
            self.observer.end(resource, since, bytes, || format!("{:?}", entry.planned.page));
        }
        let step = match step {
            Step::Second { last } => self.second(&entry, chunk, count, last, taken).unwrap_or_else(|error| {
                self.chunks.lock().get_mut(&id).map_or(Step::Nothing, |chunks| chunks.fail(error))
            }),
            step => step,
        };
        if let Step::Ended(result) = step {
            self.chunks.lock().remove(&id);
            self.in_flight.lock().remove(&id);
            if !fills {
                self.wipes.all_written(id);
            }
            let written = |()| if fills { Ok(()) } else { self.written(&entry) };
            ended.push((entry.planned, result.and_then(written)));
        }
    }

    /// Submits the second operation of a chunk.
    ///
    /// # Errors
    /// If the page is not what it should be, or the operation cannot be made. Then nothing was submitted.
    fn second(
        &self,
        entry: &InFlight,
        chunk: usize,
        count: usize,
        last: bool,
        taken: &mut Vec<(MoveId, FillPoint)>,
    ) -> Result<Step> {
        let planned = entry.planned;
        let (id, page) = (planned.id, planned.page);
        let io = self.segment_io(page.segment)?;
        let address = self.bytes_at(planned, self.address(&io, page))?;
        let buffer = self.io_buffer(planned, address)?;
        let Part { at, len } = self.part(chunk, count);
        let fills = matches!(planned.to, Place::Device(_));
        let write = if fills {
            if last {
                self.check(&io, page, buffer)?;
            }
            if chunk + 1 == count {
                self.zero_the_rest(&io, page, buffer);
            }
            None
        } else {
            let whole = self.operation(planned, IoKind::Write, &io, buffer)?;
            Some(self.chunk_op(&whole, chunk, count))
        };
        let since = Instant::now();
        let failed = self.chunks.lock().get_mut(&id).map(|chunks| chunks.begin_second(chunk, since));
        match failed {
            Some(None) => {}
            Some(Some(step)) => return Ok(step),
            None => return Err(Error::new(ErrorKind::Internal, format!("{id:?} has ended with a chunk in flight"))),
        }
        self.observer.begin(if fills { Resource::LinkIn } else { Resource::DiskWrite });
        let enter = |stage: Stage| {
            if let Some(entry) = self.in_flight.lock().get_mut(&id) {
                entry.stage = stage;
            }
        };
        match write {
            Some(op) => {
                if let Some(op) = self.wipes.keep(id, page, op, || enter(Stage::Writing)) {
                    self.write(page, op);
                }
            }
            None => {
                if last {
                    enter(Stage::CopyingIn);
                }
                let op = StreamOp::CopyIn { host: buffer.offset(at), device: address.offset(at), len };
                if let Some(end) = self.device.submit(self.fills, op, Some(token_of(id, chunk)))
                    && let Some(point) = self.chunk_taken(token_of(id, chunk), end)
                {
                    taken.push((id, point));
                }
            }
        }
        Ok(Step::Nothing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pager::random::Random;

    fn failed() -> Error {
        Error::new(ErrorKind::Io, "an operation failed")
    }

    /// The operations end in any order, and any of them may fail. The move ends once, after all of them, with an error
    /// exactly if one failed, and no second operation follows a failure. The device has taken up all copies only if
    /// every chunk has its second operation.
    #[test]
    fn a_move_ends_once_whatever_fails() {
        let mut random = Random(1);
        for round in 0..4000 {
            let count = 1 + random.below(6) as usize;
            let mut chunks = Chunks::new(count);
            let mut in_flight: Vec<(usize, bool)> = (0..count).map(|chunk| (chunk, false)).collect();
            let (mut failures, mut seconds, mut taken, mut lasts, mut end) = (0, 0, 0u64, 0u64, None);
            while !in_flight.is_empty() {
                assert!(end.is_none(), "{round}: ended with an operation in flight");
                let (chunk, second) = in_flight.swap_remove(random.below(in_flight.len() as u32) as usize);
                assert_eq!(chunks.operation(chunk).map(|(second, _)| second), Some(second));
                let fails = random.below(8) == 0;
                let mut step = chunks.ended(chunk, if fails { Err(failed()) } else { Ok(()) });
                assert!(failures == 0 || !matches!(step, Step::Second { .. }), "{round}: it goes on after a failure");
                failures += u64::from(fails);
                if let Step::Second { last } = step {
                    lasts += u64::from(last);
                    step = match random.below(10) {
                        0 => {
                            failures += 1;
                            chunks.fail(failed())
                        }
                        _ => chunks.begin_second(chunk, Instant::now()).unwrap_or_else(|| {
                            seconds += 1;
                            in_flight.push((chunk, true));
                            let point = chunks.taken(chunk, FillPoint::new(round + seconds));
                            taken += u64::from(point.is_some_and(|point| point == FillPoint::new(round + seconds)));
                            Step::Nothing
                        }),
                    };
                }
                if let Step::Ended(result) = step {
                    end = Some(result);
                }
            }
            assert_eq!(end.map(|end| end.is_err()), Some(failures > 0), "{round}");
            assert!(lasts <= 1 && taken == u64::from(seconds == count as u64), "{round}: {lasts}, {taken}, {seconds}");
        }
    }

    #[test]
    fn tokens_name_the_move_and_the_chunk() {
        // Serials of a pager that has begun this many moves, requests and scopes.
        let begun = [0, 1, (1 << 20) - 1, 1 << 20, 1 << 29, (1 << 30) - 1, 1 << 30, 1 << 31, u32::MAX];
        for (place, serial) in begun.iter().flat_map(|serial| [0, 1, (1 << 20) - 1].map(|place| (place, *serial))) {
            let id = MoveId::of(place, serial);
            assert!(can_name(id) && !is_chunk(Token(id.get())) && move_of(Token(id.get())) == id, "{id:?}");
            for chunk in [0, 7, 1023] {
                let token = token_of(id, chunk);
                assert_eq!(chunk_of(token), Some((id, chunk)));
                assert!(is_chunk(token) && move_of(token) == id && token.0 < super::super::CALLER_TOKENS);
            }
        }
        assert!(!can_name(MoveId::of(1 << 20, 0)));
    }
}
