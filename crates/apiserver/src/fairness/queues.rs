//! The queues of one priority level: which requests run, wait, or are refused.
//!
//! In: arrivals with their estimated work, ends, changes of the limits; each with its time. Out: decisions.
//! This module never waits or reads a clock.
//!
//! Shuffle sharding assigns requests of one flow to a few queues. The next request is the one that would
//! end first in virtual time, that is, if each queue had its fair share of seats.
//!
//! ```text
//!  arrive ─► least loaded queue of the hand ─► ▢▢▢ ─► least virtual finish ─► executing ─► finish
//!      └► refused: all seats taken, queue full            (lingers on its final seats) ─┘
//! ```
//!
//! Invariants: only queues with requests exist; the seats in use are those of running or lingering
//! requests. Upstream: `fairqueuing/queueset`, with one difference: the progress meter is wide enough never
//! to be reset.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::demand::Demand;

/// The assumed duration of a request before it is known.
const ESTIMATED_SERVICE: Duration = Duration::from_millis(3);

/// Seats times nanoseconds.
type SeatTime = i128;

/// How a level handles requests above its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handling {
    /// There is no limit.
    Exempt,
    Reject,
    Queue {
        queues: u32,
        hand_size: u32,
        length: usize,
    },
}

/// The seats of a request, and how long its final seats linger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    pub initial: u32,
    pub lasting: u32,
    pub lingers: Duration,
}

impl Work {
    pub fn seats(seats: u32) -> Self {
        Self { initial: seats, lasting: 0, lingers: Duration::ZERO }
    }

    pub fn widest(&self) -> u32 {
        self.initial.max(self.lasting)
    }

    fn total(&self) -> SeatTime {
        seat_time(self.initial, ESTIMATED_SERVICE) + seat_time(self.lasting, self.lingers)
    }
}

fn seat_time(seats: u32, time: Duration) -> SeatTime {
    SeatTime::from(seats) * time.as_nanos() as SeatTime
}

/// The flow of a request: the schema, and the distinguisher's value.
#[derive(Clone, Debug, Default)]
pub struct Flow {
    pub schema: String,
    pub distinguisher: String,
    pub hash: u64,
}

/// A request with its seats.
#[derive(Debug)]
pub struct Running {
    queue: Option<u32>,
    work: Work,
    started: Instant,
}

impl Running {
    pub fn seats(&self) -> u32 {
        self.work.widest()
    }
}

/// The decision about a new request.
pub enum Arrival {
    Runs(Running),
    Waits {
        ticket: Ticket,
        granted: oneshot::Receiver<Running>,
    },
    /// The reason, as in upstream's metrics.
    Refused(&'static str),
}

/// The position of a waiting request.
#[derive(Clone, Copy, Debug)]
pub struct Ticket {
    queue: u32,
    id: u64,
}

struct Waiting {
    id: u64,
    flow: Flow,
    work: Work,
    arrived: Instant,
    /// The progress meter at its arrival.
    arrival_r: SeatTime,
    grant: oneshot::Sender<Running>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    executing: u32,
    seats: u32,
    /// The total work in `waiting`.
    waiting_work: SeatTime,
    waiting_seats: u32,
    /// The progress meter at the virtual start of its next request.
    next_r: SeatTime,
}

impl Queue {
    fn is_active(&self) -> bool {
        !self.waiting.is_empty() || self.executing > 0
    }

    /// A request cannot start in virtual time before its virtual arrival.
    fn bound(&mut self) {
        if let Some(oldest) = self.waiting.front() {
            self.next_r = self.next_r.max(oldest.arrival_r);
        }
    }
}

/// How often each decision was made, since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub dispatched: u64,
    pub rejected: u64,
    pub timed_out: u64,
    pub cancelled: u64,
}

/// See the module.
pub struct Queues {
    handling: Handling,
    /// In seats; lending and borrowing change it.
    limit: u32,
    queues: BTreeMap<u32, Queue>,
    /// The queue that was served last.
    robin: u32,
    /// Seat time per active queue since the start, and when it was last updated.
    progress: SeatTime,
    at: Instant,
    active: u32,
    waiting: usize,
    executing: usize,
    seats_in_use: u32,
    seats_waiting: u32,
    enqueued: u64,
    last_id: u64,
    /// Seats that ended requests still hold, with the time of their release.
    lingering: Vec<(Instant, Option<u32>, u32)>,
    pub demand: Demand,
    pub counts: Counts,
}

impl Queues {
    pub fn new(handling: Handling, now: Instant) -> Self {
        Self {
            handling,
            limit: 0,
            queues: BTreeMap::new(),
            robin: 0,
            progress: 0,
            at: now,
            active: 0,
            waiting: 0,
            executing: 0,
            seats_in_use: 0,
            seats_waiting: 0,
            enqueued: 0,
            last_id: 0,
            lingering: vec![],
            demand: Demand::new(now),
            counts: Counts::default(),
        }
    }

    /// Changes the configuration or limit; surplus queues drain.
    pub fn configure(&mut self, handling: Handling, limit: u32, now: Instant) {
        self.sync(now);
        (self.handling, self.limit) = (handling, limit);
        self.dispatch(now);
    }

    pub fn limit(&self) -> u32 {
        self.limit
    }

    pub fn is_idle(&self) -> bool {
        self.waiting == 0 && self.executing == 0
    }

    pub fn waiting(&self) -> usize {
        self.waiting
    }

    pub fn executing(&self) -> usize {
        self.executing
    }

    /// When the first lingering seats are released.
    pub fn next_release(&self) -> Option<Instant> {
        self.lingering.iter().map(|(at, ..)| *at).min()
    }

    pub fn arrive(&mut self, flow: &Flow, work: Work, now: Instant) -> Arrival {
        self.sync(now);
        let Handling::Queue { queues, hand_size, length } = self.handling else {
            if !self.fits(work.widest()) {
                self.counts.rejected += 1;
                return Arrival::Refused("concurrency-limit");
            }
            return Arrival::Runs(self.run(None, work, now));
        };
        let index = self.choose(flow.hash, queues, hand_size);
        let queue = self.queues.entry(index).or_default();
        if self.seats_in_use >= self.limit && queue.waiting.len() >= length {
            self.counts.rejected += 1;
            self.forget_if_empty(index);
            return Arrival::Refused("queue-full");
        }
        if !queue.is_active() {
            queue.next_r = self.progress;
        }
        if self.waiting == 0 && self.seats_in_use < self.limit && self.fits(work.widest()) {
            // No other request waits that could run first.
            let queue = self.queues.get_mut(&index).expect("just made");
            queue.next_r = queue.next_r.max(self.progress);
            return Arrival::Runs(self.run(Some(index), work, now));
        }
        let (ticket, mut granted) = self.enqueue(index, flow, work, now);
        self.dispatch(now);
        match granted.try_recv() {
            Ok(running) => Arrival::Runs(running),
            Err(_) => Arrival::Waits { ticket, granted },
        }
    }

    /// The request ended: its seats are released, or linger first.
    pub fn finish(&mut self, running: Running, now: Instant) {
        self.sync(now);
        self.executing -= 1;
        let Running { queue, work, started } = running;
        if let Some(queue) = queue.and_then(|index| self.queues.get_mut(&index)) {
            queue.executing -= 1;
            self.active -= u32::from(!queue.is_active());
            // Charges the actual work instead of the estimate.
            let took = now.saturating_duration_since(started);
            queue.next_r -= seat_time(work.initial, ESTIMATED_SERVICE);
            queue.next_r += seat_time(work.initial, took);
            queue.bound();
        }
        if work.lingers.is_zero() {
            self.release(queue, work.widest(), now);
        } else {
            self.lingering.push((now + work.lingers, queue, work.widest()));
        }
        self.dispatch(now);
    }

    /// Removes a waiting request, unless its seats were granted already.
    pub fn leave(&mut self, ticket: Ticket, is_timeout: bool, now: Instant) {
        self.sync(now);
        let Some(queue) = self.queues.get_mut(&ticket.queue) else { return };
        let Some(at) = queue.waiting.iter().position(|one| one.id == ticket.id) else { return };
        let gone = queue.waiting.remove(at).expect("found there");
        self.counts.rejected += 1;
        self.counts.cancelled += 1;
        self.counts.timed_out += u64::from(is_timeout);
        queue.bound();
        self.left_queue(ticket.queue, &gone.work, now);
        self.dispatch(now);
    }

    /// Releases seats that have lingered long enough.
    pub fn tick(&mut self, now: Instant) {
        self.sync(now);
        self.dispatch(now);
    }

    /// Updates the progress meter, and releases seats that are due.
    fn sync(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_nanos() as SeatTime;
        self.at = self.at.max(now);
        if self.active > 0 {
            let seats = (self.seats_in_use + self.seats_waiting).min(self.limit);
            self.progress += passed * SeatTime::from(seats) / SeatTime::from(self.active);
        }
        if self.lingering.is_empty() {
            return;
        }
        let (over, still) =
            std::mem::take(&mut self.lingering).into_iter().partition(|one| one.0 <= now);
        self.lingering = still;
        for (_, queue, seats) in over {
            self.release(queue, seats, now);
        }
    }

    fn release(&mut self, queue: Option<u32>, seats: u32, now: Instant) {
        self.seats_in_use -= seats;
        self.demand.set(f64::from(self.seats_in_use + self.seats_waiting), now);
        let Some(index) = queue else { return };
        if let Some(queue) = self.queues.get_mut(&index) {
            queue.seats -= seats;
        }
        self.forget_if_empty(index);
    }

    fn forget_if_empty(&mut self, index: u32) {
        if self.queues.get(&index).is_some_and(|queue| !queue.is_active() && queue.seats == 0) {
            self.queues.remove(&index);
        }
    }

    /// The queue with the least waiting work among those of the flow.
    fn choose(&mut self, hash: u64, queues: u32, hand_size: u32) -> u32 {
        let hand = deal(hash, queues, hand_size);
        let offset = (self.enqueued % hand.len() as u64) as usize;
        self.enqueued += 1;
        let turned = hand.iter().cycle().skip(offset).take(hand.len());
        let load = |index: &&u32| self.queues.get(*index).map_or(0, |queue| queue.waiting_work);
        turned.min_by_key(load).copied().expect("a hand has a card")
    }

    fn enqueue(
        &mut self,
        index: u32,
        flow: &Flow,
        work: Work,
        now: Instant,
    ) -> (Ticket, oneshot::Receiver<Running>) {
        let (grant, granted) = oneshot::channel();
        self.last_id += 1;
        let id = self.last_id;
        let queue = self.queues.entry(index).or_default();
        self.active += u32::from(!queue.is_active());
        queue.waiting_work += work.total();
        queue.waiting_seats += work.widest();
        let (flow, arrival_r) = (flow.clone(), self.progress);
        queue.waiting.push_back(Waiting { id, flow, work, arrived: now, arrival_r, grant });
        queue.bound();
        self.waiting += 1;
        self.seats_waiting += work.widest();
        self.demand.set(f64::from(self.seats_in_use + self.seats_waiting), now);
        (Ticket { queue: index, id }, granted)
    }

    /// The bookkeeping for a request that no longer waits.
    fn left_queue(&mut self, index: u32, work: &Work, now: Instant) {
        let queue = self.queues.get_mut(&index).expect("it waited there");
        queue.waiting_work -= work.total();
        queue.waiting_seats -= work.widest();
        self.active -= u32::from(!queue.is_active());
        self.waiting -= 1;
        self.seats_waiting -= work.widest();
        self.demand.set(f64::from(self.seats_in_use + self.seats_waiting), now);
        self.forget_if_empty(index);
    }

    fn fits(&self, seats: u32) -> bool {
        match self.handling {
            Handling::Exempt => true,
            // A request that is wider than the level runs alone.
            _ if seats > self.limit => self.executing == 0,
            _ => self.seats_in_use + seats <= self.limit,
        }
    }

    fn run(&mut self, index: Option<u32>, mut work: Work, now: Instant) -> Running {
        if index.is_some() && work.lasting > self.limit && self.limit > 0 {
            // Fewer seats, for a proportionally longer time.
            let nanos = work.lingers.as_nanos() * u128::from(work.lasting) / u128::from(self.limit);
            work.lasting = self.limit;
            work.lingers = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        }
        if let Some(index) = index {
            let queue = self.queues.entry(index).or_default();
            self.active += u32::from(!queue.is_active());
            queue.executing += 1;
            queue.seats += work.widest();
            queue.next_r += work.total();
            queue.bound();
        }
        self.executing += 1;
        self.seats_in_use += work.widest();
        self.counts.dispatched += 1;
        self.demand.set(f64::from(self.seats_in_use + self.seats_waiting), now);
        Running { queue: index, work, started: now }
    }

    /// Starts requests as long as there are seats.
    fn dispatch(&mut self, now: Instant) {
        while self.waiting > 0 && self.seats_in_use < self.limit {
            let Some(index) = self.next_queue() else { return };
            let queue = self.queues.get_mut(&index).expect("it has the next request");
            let next = queue.waiting.pop_front().expect("it has the next request");
            self.robin = index;
            if next.grant.is_closed() {
                // Its client has just disconnected.
                self.left_queue(index, &next.work, now);
                continue;
            }
            // The queue counts as active again.
            self.active -= u32::from(!queue.is_active());
            let running = self.run(Some(index), next.work, now);
            self.left_running(index, &next.work, now);
            if let Err(running) = next.grant.send(running) {
                self.finish_unstarted(running, now);
            }
        }
    }

    /// Like [`left_queue`](Self::left_queue), for a request that runs: its queue is active already.
    fn left_running(&mut self, index: u32, work: &Work, now: Instant) {
        let queue = self.queues.get_mut(&index).expect("it runs");
        queue.waiting_work -= work.total();
        queue.waiting_seats -= work.widest();
        self.waiting -= 1;
        self.seats_waiting -= work.widest();
        self.demand.set(f64::from(self.seats_in_use + self.seats_waiting), now);
    }

    /// The client disconnected while the seats were granted.
    fn finish_unstarted(&mut self, running: Running, now: Instant) {
        self.executing -= 1;
        if let Some(queue) = running.queue.and_then(|index| self.queues.get_mut(&index)) {
            queue.executing -= 1;
            self.active -= u32::from(!queue.is_active());
        }
        self.release(running.queue, running.work.widest(), now);
    }

    /// The queue whose oldest request would end first, starting after the last served one; `None` if there
    /// are not enough seats for that request.
    fn next_queue(&self) -> Option<u32> {
        let behind = self.queues.range(self.robin.saturating_add(1)..);
        let round = behind.chain(self.queues.range(..=self.robin));
        let waiting = round.filter_map(|(index, queue)| {
            let oldest = queue.waiting.front()?;
            Some((queue.next_r + oldest.work.total(), *index, oldest.work.widest()))
        });
        let (_, index, seats) = waiting.min_by_key(|(finish, ..)| *finish)?;
        self.fits(seats).then_some(index)
    }

    /// For the dumps: each queue's index, waiting and executing requests, seats, and virtual start.
    pub fn dump(&self) -> impl Iterator<Item = QueueDump> {
        self.queues.iter().map(|(index, queue)| QueueDump {
            index: *index,
            waiting: queue.waiting.len(),
            executing: queue.executing,
            seats: queue.seats,
            next_r: queue.next_r,
            initial_seats: queue.waiting.iter().map(|one| one.work.initial).sum(),
            widest_seats: queue.waiting_seats,
            work: queue.waiting_work,
        })
    }

    /// The waiting requests: queue, position, flow, arrival and work.
    pub fn waiters(&self) -> impl Iterator<Item = (u32, usize, &Flow, Instant, Work)> {
        self.queues.iter().flat_map(|(index, queue)| {
            let places = queue.waiting.iter().enumerate();
            places.map(|(place, one)| (*index, place, &one.flow, one.arrived, one.work))
        })
    }
}

pub struct QueueDump {
    pub index: u32,
    pub waiting: usize,
    pub executing: u32,
    pub seats: u32,
    pub next_r: SeatTime,
    pub initial_seats: u32,
    pub widest_seats: u32,
    pub work: SeatTime,
}

/// Deals `hand_size` different cards of a deck, by the hash. Upstream: `shufflesharding.Dealer`.
fn deal(mut hash: u64, deck: u32, hand_size: u32) -> Vec<u32> {
    let deck = u64::from(deck.max(1));
    let hand_size = u64::from(hand_size.max(1)).min(deck);
    let mut remainders = Vec::with_capacity(hand_size as usize);
    for dealt in 0..hand_size {
        remainders.push(hash % (deck - dealt));
        hash /= deck - dealt;
    }
    let card = |index: usize| {
        let before = remainders[..index].iter().rev();
        before.fold(remainders[index], |card, earlier| card + u64::from(card >= *earlier)) as u32
    };
    (0..remainders.len()).map(card).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUEUING: Handling = Handling::Queue { queues: 8, hand_size: 2, length: 3 };

    fn flow(name: &str, hash: u64) -> Flow {
        Flow { schema: "s".into(), distinguisher: name.into(), hash }
    }

    fn open(handling: Handling, limit: u32) -> (Queues, Instant) {
        let now = Instant::now();
        let mut queues = Queues::new(handling, now);
        queues.configure(handling, limit, now);
        (queues, now)
    }

    fn runs(arrival: Arrival) -> Running {
        match arrival {
            Arrival::Runs(running) => running,
            Arrival::Waits { .. } => panic!("waits"),
            Arrival::Refused(why) => panic!("refused: {why}"),
        }
    }

    fn waits(arrival: Arrival) -> (Ticket, oneshot::Receiver<Running>) {
        match arrival {
            Arrival::Waits { ticket, granted } => (ticket, granted),
            Arrival::Runs(_) => panic!("runs"),
            Arrival::Refused(why) => panic!("refused: {why}"),
        }
    }

    fn refused(arrival: Arrival) -> &'static str {
        match arrival {
            Arrival::Refused(why) => why,
            _ => panic!("not refused"),
        }
    }

    /// Nothing may be left after all requests have ended.
    fn assert_empty(queues: &Queues) {
        assert!(queues.is_idle() && queues.queues.is_empty());
        let left = (queues.seats_in_use, queues.seats_waiting, queues.active);
        assert_eq!(left, (0, 0, 0));
    }

    #[test]
    fn hands_have_different_cards() {
        for hash in [0, 1, 7, 12345, u64::MAX, 0x1234_5678_9abc_def0] {
            let mut hand = deal(hash, 128, 6);
            assert!(hand.iter().all(|card| *card < 128), "{hand:?}");
            hand.sort_unstable();
            hand.dedup();
            assert_eq!(hand.len(), 6);
        }
        // By hand: 14 + 128 * (73 + 127 * 118), where the third card skips both earlier ones.
        assert_eq!(deal(14 + 128 * (72 + 127 * 117), 128, 3), [14, 73, 119]);
    }

    #[test]
    fn exempt_levels_never_refuse_and_rejecting_levels_refuse_above_the_limit() {
        let (mut queues, now) = open(Handling::Exempt, 0);
        for _ in 0..100 {
            runs(queues.arrive(&flow("a", 0), Work::seats(1), now));
        }
        let (mut queues, now) = open(Handling::Reject, 2);
        let first = runs(queues.arrive(&flow("a", 0), Work::seats(2), now));
        assert_eq!(refused(queues.arrive(&flow("a", 0), Work::seats(1), now)), "concurrency-limit");
        queues.finish(first, now);
        let wide = runs(queues.arrive(&flow("a", 0), Work::seats(5), now));
        queues.finish(wide, now);
        assert_empty(&queues);
    }

    #[test]
    fn queues_fill_and_drain_in_order() {
        let (mut queues, now) = open(Handling::Queue { queues: 1, hand_size: 1, length: 2 }, 1);
        let arrive = |queues: &mut Queues| queues.arrive(&flow("a", 0), Work::seats(1), now);
        let first = runs(arrive(&mut queues));
        let (_, mut second) = waits(arrive(&mut queues));
        let (third, mut dropped) = waits(arrive(&mut queues));
        assert_eq!(refused(arrive(&mut queues)), "queue-full");
        queues.finish(first, now);
        let second = second.try_recv().expect("its turn");
        queues.leave(third, true, now);
        assert!(dropped.try_recv().is_err());
        queues.finish(second, now);
        assert_empty(&queues);
        let counts = queues.counts;
        assert_eq!((counts.dispatched, counts.rejected, counts.timed_out), (2, 2, 1));
    }

    #[test]
    fn a_small_flow_overtakes_a_big_one() {
        let (mut queues, start) = open(Handling::Queue { queues: 2, hand_size: 1, length: 50 }, 1);
        let first = runs(queues.arrive(&flow("big", 0), Work::seats(1), start));
        let mut big: Vec<_> =
            (0..10).map(|_| waits(queues.arrive(&flow("big", 0), Work::seats(1), start))).collect();
        let (_, mut small) = waits(queues.arrive(&flow("small", 1), Work::seats(1), start));
        // The large flow's first request took ten times the estimate, which is charged to its queue.
        queues.finish(first, start + Duration::from_millis(30));
        let small = small.try_recv().expect("before the ten that came earlier");
        assert!(big.iter_mut().all(|(_, granted)| granted.try_recv().is_err()));
        queues.finish(small, start + Duration::from_millis(33));
        assert!(big[0].1.try_recv().is_ok());
    }

    #[test]
    fn seats_linger_until_their_time() {
        let (mut queues, now) = open(QUEUING, 4);
        let work = Work { initial: 1, lasting: 4, lingers: Duration::from_millis(5) };
        let running = runs(queues.arrive(&flow("a", 0), work, now));
        let (_, mut granted) = waits(queues.arrive(&flow("a", 0), Work::seats(1), now));
        queues.finish(running, now);
        assert!(granted.try_recv().is_err());
        assert_eq!(queues.next_release(), Some(now + Duration::from_millis(5)));
        queues.tick(now + Duration::from_millis(5));
        let running = granted.try_recv().expect("the seats are free");
        queues.finish(running, now);
        assert_empty(&queues);
    }

    #[test]
    fn disconnected_requests_are_skipped() {
        let (mut queues, now) = open(QUEUING, 1);
        let running = runs(queues.arrive(&flow("a", 0), Work::seats(1), now));
        drop(waits(queues.arrive(&flow("a", 0), Work::seats(1), now)));
        let (_, mut granted) = waits(queues.arrive(&flow("a", 0), Work::seats(1), now));
        queues.finish(running, now);
        let running = granted.try_recv().expect("the next one");
        queues.finish(running, now);
        assert_empty(&queues);
    }

    #[test]
    fn a_larger_limit_starts_waiting_requests() {
        let (mut queues, now) = open(QUEUING, 1);
        let _running = runs(queues.arrive(&flow("a", 0), Work::seats(1), now));
        let (_, mut granted) = waits(queues.arrive(&flow("b", 9), Work::seats(1), now));
        queues.configure(QUEUING, 2, now);
        assert!(granted.try_recv().is_ok());
    }
}
