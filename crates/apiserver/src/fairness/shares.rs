//! The seats of levels: limits from the configured shares, and their adjustment by demand.
//!
//! In: shares, percentages and demands of all levels. Out: limits. Upstream: `conc_alloc.go` and
//! `updateBorrowingLocked`.

use super::demand::Stats;

/// The limits of a level's configuration, in seats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub nominal: u32,
    /// Seats that other levels may not borrow.
    pub lower: u32,
    /// The maximum, including borrowed seats.
    pub upper: u32,
}

impl Limits {
    /// Rounded up, so that the sum may be a little more than the server's limit.
    pub fn of(server: u32, shares: u32, sum: u32, lendable: u32, borrowing: Option<u32>) -> Self {
        let part = f64::from(server) * f64::from(shares) / f64::from(sum.max(1));
        let nominal = part.ceil() as u32;
        let percent =
            |percent: u32| (f64::from(nominal) * f64::from(percent) / 100.0).round() as u32;
        Self {
            nominal,
            lower: nominal.saturating_sub(percent(lendable)),
            upper: nominal.saturating_add(borrowing.map_or(server, percent)),
        }
    }
}

/// A level in the distribution of seats.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    pub is_exempt: bool,
    pub limits: Limits,
    pub demand: Stats,
}

impl Claim {
    /// The minimum: its recent use, between its lower and its nominal limit.
    fn floor(&self) -> u32 {
        let high = self.demand.high;
        match self.is_exempt {
            true => self.limits.lower.max(high),
            false => self.limits.lower.max(high.min(self.limits.nominal)),
        }
    }

    pub fn target(&self) -> f64 {
        f64::from(self.floor()).max(self.demand.smoothed)
    }
}

/// The limits for the coming period, in the order of the claims, and the fair fraction.
pub fn adjust(claims: &[Claim], current: &[u32]) -> (Vec<u32>, f64) {
    let nominal: u32 = claims.iter().map(|claim| claim.limits.nominal).sum();
    let limited = || claims.iter().filter(|claim| !claim.is_exempt);
    let exempt: u32 = claims.iter().filter(|claim| claim.is_exempt).map(Claim::floor).sum();
    let remaining = nominal.saturating_sub(exempt);
    let lower: u32 = limited().map(|claim| claim.limits.lower).sum();
    let floors: u32 = limited().map(Claim::floor).sum();
    let pick = |of: &mut dyn FnMut(&Claim) -> u32| {
        claims.iter().map(|claim| if claim.is_exempt { claim.floor() } else { of(claim) }).collect()
    };
    if remaining <= lower {
        return (pick(&mut |claim| claim.limits.lower), 0.0);
    }
    if remaining <= floors {
        let part = f64::from(remaining - lower) / f64::from(floors - lower);
        let above = |claim: &Claim| f64::from(claim.floor() - claim.limits.lower) * part;
        return (pick(&mut |claim| claim.limits.lower + above(claim).round() as u32), 0.0);
    }
    let items: Vec<Item> = limited().map(Item::of).collect();
    let Some((seats, fair)) = allocate(f64::from(nominal), &items) else {
        return (current.to_vec(), 0.0);
    };
    let mut seats = seats.into_iter();
    (pick(&mut |_| seats.next().expect("one for each").round() as u32), fair)
}

struct Item {
    target: f64,
    lower: f64,
    upper: f64,
}

impl Item {
    fn of(claim: &Claim) -> Self {
        /// Avoids a division by zero.
        const LEAST: f64 = 0.001;
        let (lower, upper) = (f64::from(claim.floor()), f64::from(claim.limits.upper));
        Self { target: claim.target().max(LEAST), lower, upper: upper.max(lower) }
    }

    fn at(&self, fair: f64) -> f64 {
        (fair * self.target).clamp(self.lower, self.upper)
    }
}

/// Finds the factor by which all targets are multiplied, within their bounds, so that their sum is `sum`;
/// `None` if the bounds make that impossible.
fn allocate(sum: f64, items: &[Item]) -> Option<(Vec<f64>, f64)> {
    const NEARLY: f64 = 1e-7;
    let total = |fair: f64| items.iter().map(|item| item.at(fair)).sum::<f64>();
    if total(0.0) > sum + NEARLY || items.iter().map(|item| item.upper).sum::<f64>() < sum - NEARLY
    {
        return None;
    }
    // The sum grows with the factor, and is linear between the factors at which an item meets a bound: the
    // solution is after the last such factor whose sum is not too large.
    let mut bends: Vec<f64> = items
        .iter()
        .flat_map(|item| [item.lower / item.target, item.upper / item.target])
        .collect();
    bends.sort_unstable_by(f64::total_cmp);
    let start = bends.iter().copied().rfind(|bend| total(*bend) <= sum).unwrap_or(0.0);
    let grows =
        |item: &&Item| item.lower <= start * item.target && start * item.target < item.upper;
    let slope: f64 = items.iter().filter(grows).map(|item| item.target).sum();
    let fair = if slope > 0.0 { start + (sum - total(start)) / slope } else { start };
    Some((items.iter().map(|item| item.at(fair)).collect(), fair))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Upstream's suggested levels on the default server: 600 seats, 245 shares.
    #[test]
    fn limits_follow_the_shares() {
        let check = |shares, lendable, expected: (u32, u32, u32)| {
            let limits = Limits::of(600, shares, 245, lendable, None);
            assert_eq!((limits.nominal, limits.lower, limits.upper), expected, "{shares}");
        };
        check(0, 0, (0, 0, 600));
        check(5, 0, (13, 13, 613));
        check(20, 50, (49, 24, 649));
        check(30, 33, (74, 50, 674));
        check(40, 25, (98, 73, 698));
        check(100, 90, (245, 24, 845));
        let bounded = Limits::of(600, 20, 245, 50, Some(10));
        assert_eq!(bounded.upper, 54);
    }

    fn claim(nominal: u32, lower: u32, upper: u32, high: u32, smoothed: f64) -> Claim {
        let demand = Stats { high, smoothed, ..Stats::default() };
        Claim { is_exempt: false, limits: Limits { nominal, lower, upper }, demand }
    }

    #[test]
    fn seats_go_to_where_the_demand_is() {
        // No demand: the lender keeps at least its lower limit, and all seats are distributed.
        let idle = [claim(50, 25, 150, 0, 0.0), claim(50, 50, 150, 0, 0.0)];
        let (seats, _) = adjust(&idle, &[0, 0]);
        assert_eq!(seats.iter().sum::<u32>(), 100);
        assert!(seats[0] >= 25 && seats[1] >= 50);
        // One is busy and may borrow the other's seats.
        let busy = [claim(50, 25, 150, 0, 0.0), claim(50, 50, 150, 200, 200.0)];
        assert_eq!(adjust(&busy, &[0, 0]).0, [25, 75]);
        // But not above its own upper limit.
        let bound = [claim(50, 25, 150, 0, 0.0), claim(50, 50, 60, 200, 200.0)];
        assert_eq!(adjust(&bound, &[0, 0]).0, [40, 60]);
    }

    #[test]
    fn exempt_demand_comes_first() {
        let mut exempt = claim(0, 0, 600, 90, 90.0);
        exempt.is_exempt = true;
        let claims = [exempt, claim(50, 25, 150, 50, 50.0), claim(50, 0, 150, 50, 50.0)];
        // 10 seats remain, fewer than the lower limits.
        assert_eq!(adjust(&claims, &[0; 3]).0, [90, 25, 0]);
        let mut claims = claims;
        claims[0].demand.high = 40;
        // 60 of the 100 seats of these two are left: the seats above the lower limits are shared.
        assert_eq!(adjust(&claims, &[0; 3]).0, [40, 37, 23]);
    }
}
