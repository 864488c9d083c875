//! A server with few seats: which requests run, wait, or are refused.

use super::*;

fn level(name: &str, handling: Handling, shares: u32) -> PriorityLevel {
    let uid = format!("uid of {name}");
    PriorityLevel { name: name.into(), uid, handling, shares, ..exempt_level() }
}

fn schema(name: &str, level: &str, precedence: i32, group: &str) -> FlowSchema {
    let distinguisher = Distinguisher::ByUser;
    let uid = format!("uid of {name}");
    let spec = everything(name, precedence, &[group]);
    FlowSchema { level: level.into(), distinguisher, uid, ..spec }
}

const QUEUING: Handling = Handling::Queue { queues: 4, hand_size: 1, length: 2 };

/// Four seats: one for the catch-all level, one for the rejecting level, two for the queuing level.
fn fairness(tasks: &Tasks) -> Fairness {
    let fairness = Fairness::new(4, tasks.clone());
    fairness.configure(config());
    fairness
}

fn config() -> Config {
    Config {
        schemas: vec![
            schema("queuing", "queuing", 200, "queuers"),
            schema("rejecting", "rejecting", 200, "pushers"),
            schema("early", "rejecting", 100, "early"),
            schema("dangling", "nowhere", 50, "queuers"),
        ],
        levels: vec![
            level("queuing", QUEUING, 10),
            level("rejecting", Handling::Reject, 5),
            PriorityLevel { uid: "uid of exempt".into(), ..exempt_level() },
        ],
    }
}

fn info() -> RequestInfo {
    RequestInfo {
        is_resource: true,
        verb: "get".into(),
        resource: "pods".into(),
        ..RequestInfo::default()
    }
}

async fn enter(fairness: &Fairness, user: &UserInfo) -> Result<Place, Refused> {
    let class = fairness.classify(&info(), user);
    let patience = Duration::from_secs(15);
    fairness.enter(&class, &info(), user, Work::seats(1), patience).await
}

#[tokio::test]
async fn requests_are_classified_by_precedence() {
    let tasks = Tasks::new("test");
    let fairness = fairness(&tasks);
    let check = |groups: &[&str], expected: [&str; 2]| {
        let class = fairness.classify(&info(), &UserInfo::new("jane", groups));
        assert_eq!([class.schema_uid(), class.level_uid()], expected, "{groups:?}");
    };
    check(&["queuers"], ["uid of queuing", "uid of queuing"]);
    check(&["queuers", "pushers"], ["uid of queuing", "uid of queuing"]);
    check(&["early", "queuers"], ["uid of early", "uid of rejecting"]);
    check(&["system:masters", "early"], ["", "uid of exempt"]);
    check(&["system:authenticated"], ["", ""]);
    check(&[], ["", ""]);
}

#[tokio::test(start_paused = true)]
async fn queued_requests_run_in_order_and_too_many_are_refused() {
    let tasks = Tasks::new("test");
    let fairness = fairness(&tasks);
    let user = UserInfo::new("jane", &["queuers"]);
    let first = enter(&fairness, &user).await.expect("a seat");
    let second = enter(&fairness, &user).await.expect("another seat");
    let mut third = Box::pin(enter(&fairness, &user));
    let mut fourth = Box::pin(enter(&fairness, &user));
    assert!(futures::poll!(&mut third).is_pending() && futures::poll!(&mut fourth).is_pending());
    let refused = enter(&fairness, &user).await.map(drop).expect_err("the queue is full");
    assert_eq!(refused, Refused { retry_after: 1 });
    // Administrators are always served.
    for _ in 0..10 {
        enter(&fairness, &UserInfo::new("root", &["system:masters"])).await.expect("exempt");
    }
    drop(first);
    let third = third.await.expect("its turn");
    drop((second, third));
    drop(fourth.await.expect("its turn"));
    let page = fairness.dump("/debug/api_priority_and_fairness/dump_priority_levels");
    let page = page.expect("a page");
    let line = page.lines().find(|line| line.starts_with("queuing,")).expect("its line");
    let cells: Vec<&str> = line.split(',').map(str::trim).collect();
    assert_eq!(cells, ["queuing", "0", "true", "false", "0", "0", "4", "1", "0", "0"]);
    let mut metrics = String::new();
    fairness.encode(&mut metrics);
    for line in [
        r#"apiserver_flowcontrol_dispatched_requests_total{flow_schema="queuing",priority_level="queuing"} 4"#,
        r#"apiserver_flowcontrol_rejected_requests_total{flow_schema="queuing",priority_level="queuing",reason="queue-full"} 1"#,
        r#"apiserver_flowcontrol_current_executing_requests{flow_schema="queuing",priority_level="queuing"} 0"#,
        r#"apiserver_flowcontrol_current_inqueue_seats{flow_schema="queuing",priority_level="queuing"} 0"#,
        r#"apiserver_flowcontrol_nominal_limit_seats{priority_level="queuing"} 2"#,
    ] {
        assert!(metrics.contains(line), "{line} in\n{metrics}");
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_requests_time_out() {
    let tasks = Tasks::new("test");
    let fairness = fairness(&tasks);
    let user = UserInfo::new("jane", &["queuers"]);
    let _seats = [enter(&fairness, &user).await, enter(&fairness, &user).await];
    let start = Instant::now();
    assert!(enter(&fairness, &user).await.is_err());
    assert_eq!(start.elapsed().as_secs(), 15);
}

#[tokio::test(start_paused = true)]
async fn the_rejecting_level_queues_no_request() {
    let tasks = Tasks::new("test");
    let fairness = fairness(&tasks);
    let user = UserInfo::new("jane", &["pushers"]);
    let seat = enter(&fairness, &user).await.expect("the one seat");
    assert!(enter(&fairness, &user).await.is_err());
    drop(seat);
    assert!(enter(&fairness, &user).await.is_ok());
}

/// A busy level borrows seats after the period, without a new request.
#[tokio::test(start_paused = true)]
async fn waiting_requests_get_borrowed_seats() {
    let tasks = Tasks::new("test");
    let fairness = Fairness::new(25, tasks.clone());
    let mut config = config();
    for level in &mut config.levels[..2] {
        (level.shares, level.lendable_percent) = (10, 90);
    }
    fairness.configure(config);
    let user = UserInfo::new("jane", &["queuers"]);
    let mut seats = vec![];
    let limit = fairness.0.plan.load().levels["queuing"].live.queues().limit();
    for _ in 0..limit {
        seats.push(enter(&fairness, &user).await.expect("a seat"));
    }
    let start = Instant::now();
    seats.push(enter(&fairness, &user).await.expect("a borrowed seat"));
    assert_eq!(start.elapsed(), ADJUSTMENT_PERIOD);
}

#[tokio::test(start_paused = true)]
async fn removed_levels_drain() {
    let tasks = Tasks::new("test");
    let fairness = fairness(&tasks);
    let user = UserInfo::new("jane", &["queuers"]);
    let seat = enter(&fairness, &user).await.expect("a seat");
    fairness.configure(Config::default());
    assert!(fairness.0.plan.load().levels.contains_key("queuing"));
    assert_eq!(fairness.classify(&info(), &user).schema().spec.name, CATCH_ALL);
    drop(seat);
    assert!(!fairness.0.plan.load().levels.contains_key("queuing"));
}

#[tokio::test(start_paused = true)]
async fn a_disconnected_client_leaves_its_queue() {
    let tasks = Tasks::new("test");
    let fairness = fairness(&tasks);
    let user = UserInfo::new("jane", &["queuers"]);
    let seats = [enter(&fairness, &user).await, enter(&fairness, &user).await];
    let mut gone = Box::pin(enter(&fairness, &user));
    assert!(futures::poll!(&mut gone).is_pending());
    drop(gone);
    drop(seats);
    assert!(fairness.0.plan.load().levels["queuing"].live.queues().is_idle());
}
