//! Describes in words which requests wait for what.

use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::Engine;
use crate::error::Result;
use crate::ids::{Bytes, PageId, RequestId, ScopeId};
use crate::pager::{self, Purpose, WaitsFor};

/// The result of [`Observe::waiting`](crate::stats::Observe::waiting).
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Waiting {
    /// Waiting requests in the order they are served, up to 64.
    pub waiters: Vec<Waiter>,
    /// How many requests wait in all.
    pub total: usize,
}

/// A request that waits.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Waiter {
    /// The request.
    pub id: RequestId,
    /// Its scope; None if it is outside of scopes.
    pub scope: Option<ScopeName>,
    /// Whether its scope holds pins while it waits.
    pub holds: bool,
    /// What it wants to pin.
    pub wants: String,
    /// The size of that, in whole pages.
    pub size: Bytes,
    /// Whether it wants to write.
    pub writes: bool,
    /// How long it has waited.
    pub waited: Duration,
    /// What it waits for.
    pub waits_for: WaitsFor,
    /// The same in words.
    pub obstacle: String,
    /// Who holds that; empty if it waits for reads and copies.
    pub holders: Vec<Holder>,
}

/// A scope, by number and label.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ScopeName {
    /// Its number.
    pub id: ScopeId,
    /// Its label; may be empty.
    pub label: String,
}

impl fmt::Display for ScopeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "scope {}", self.id.get() as u32)?;
        if self.label.is_empty() { Ok(()) } else { write!(f, " {:?}", self.label) }
    }
}

/// A scope that has pages pinned, or all pins outside of scopes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Holder {
    /// The scope; None for pins outside of scopes, whose owners are not known.
    pub scope: Option<ScopeName>,
    /// How many pages it has pinned.
    pub pages: u64,
    /// The first of them; empty if all that it has are frames set aside.
    pub first: String,
    /// Whether one of them is pinned for writing.
    pub writes: bool,
}

/// The most requests that are reported.
const MOST: usize = 64;
/// The most holders that are named in a line.
const NAMED: usize = 8;

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.total == 0 {
            return f.write_str("nothing waits");
        }
        for (number, waiter) in self.waiters.iter().enumerate() {
            if number > 0 {
                writeln!(f)?;
            }
            write!(f, "{waiter}")?;
        }
        let more = self.total - self.waiters.len();
        if more > 0 { write!(f, "\nand {more} more") } else { Ok(()) }
    }
}

impl fmt::Display for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.scope {
            _ if matches!(self.waits_for, WaitsFor::Budget { .. }) => f.write_str("a smaller budget")?,
            Some(scope) => write!(f, "{scope}")?,
            None => f.write_str("a pin outside of scopes")?,
        }
        if self.holds {
            f.write_str(", which holds pins,")?;
        }
        let to = match self.waits_for {
            WaitsFor::Budget { .. } => "give back",
            _ if self.writes => "write",
            _ => "read",
        };
        write!(
            f,
            " has waited {:.1} s to {to} {} ({}): {}",
            self.waited.as_secs_f64(),
            self.wants,
            self.size,
            self.obstacle
        )?;
        for (number, holder) in self.holders.iter().take(NAMED).enumerate() {
            f.write_str(if number == 0 { "; held by " } else { ", " })?;
            match &holder.scope {
                Some(scope) => write!(f, "{scope}")?,
                None => f.write_str("pins outside of scopes")?,
            }
            write!(f, " ({} pages", holder.pages)?;
            if !holder.first.is_empty() {
                write!(f, ", the first is {}", holder.first)?;
            }
            f.write_str(if holder.writes { ", to write)" } else { ")" })?;
        }
        let more = self.holders.len().saturating_sub(NAMED);
        if more > 0 { write!(f, " and {more} more") } else { Ok(()) }
    }
}

impl Engine {
    /// Which requests wait for what.
    pub(crate) fn waiting(&self) -> Waiting {
        let now = Instant::now();
        // `told` looks at every page, so it runs after the latch is released.
        let Some(seen) = self.look(|pager| pager.who_waits(MOST)) else { return Waiting::default() };
        let (waiters, total) = seen.told();
        let since: Result<Vec<Option<Instant>>> = self.hold(|latched| {
            waiters.iter().map(|waiter| latched.tickets.get(&waiter.id).map(|ticket| ticket.since())).collect()
        });
        let Ok(since) = since else { return Waiting::default() };
        let waiters = waiters.into_iter().zip(since).map(|(waiter, since)| self.in_words(waiter, now, since)).collect();
        Waiting { waiters, total }
    }

    fn in_words(&self, waiter: pager::Waiter, now: Instant, since: Option<Instant>) -> Waiter {
        let name = |scope: Option<(ScopeId, String)>| scope.map(|(id, label)| ScopeName { id, label });
        let page = |page: PageId| self.describe(page);
        let wants = match (waiter.first, waiter.pages) {
            (None, _) => match waiter.waits_for {
                WaitsFor::Budget { over: 1, .. } => "1 frame".to_owned(),
                WaitsFor::Budget { over, .. } => format!("{over} frames"),
                _ => "what its scope is to reserve".to_owned(),
            },
            (Some(first), 1) => page(first),
            (Some(first), pages) => format!("{pages} pages from {}", page(first)),
        };
        let pages = match waiter.waits_for {
            WaitsFor::Frames { wanted, .. } if waiter.pages == 0 => u64::from(wanted),
            WaitsFor::Budget { over, .. } => u64::from(over),
            _ => waiter.pages,
        };
        let obstacle = match waiter.waits_for {
            WaitsFor::Frames { wanted, budget } => {
                let size = Bytes::new(u64::from(budget) * self.page_bytes);
                format!("waits for {wanted} frames of a budget of {budget} ({size})")
            }
            WaitsFor::Page(of) => format!("waits for {}", page(of)),
            WaitsFor::Budget { budget, .. } => {
                let size = Bytes::new(u64::from(budget) * self.page_bytes);
                if waiter.holders.is_empty() {
                    format!(
                        "waits for writes or copies that are under way, to have a budget of {budget} frames ({size})"
                    )
                } else {
                    format!("guards and scopes have more than the budget of {budget} frames ({size})")
                }
            }
            // Only moves are left.
            _ => "waits for reads, writes or copies that are under way".to_owned(),
        };
        let holder = |pager::Holder { scope, pages, first, writes, .. }| Holder {
            scope: name(scope),
            pages,
            first: first.map(page).unwrap_or_default(),
            writes,
        };
        Waiter {
            id: waiter.id,
            scope: name(waiter.scope),
            holds: waiter.holds,
            wants,
            size: Bytes::new(pages * self.page_bytes),
            writes: waiter.purpose == Purpose::Write,
            waited: since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since)),
            waits_for: waiter.waits_for,
            obstacle,
            holders: waiter.holders.into_iter().map(holder).collect(),
        }
    }
}
