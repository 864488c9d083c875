//! The rules decide as the API says, after any series of changes.

use base::rng::below;
use policy::model::Model;

use crate::machine::accepts;
use crate::naive::{Packet, allows};
use crate::world::{PROTOCOLS, World, pick};

const WORLDS: usize = 40;
const CHANGES: usize = 40;
const PACKETS: usize = 1_000;

fn judge(world: &World, model: &Model) {
    let addresses = world.addresses();
    let any = || addresses[below(addresses.len() as u64) as usize];
    for _ in 0..PACKETS {
        let (from, to) = (any(), any());
        if from.is_ipv4() != to.is_ipv4() {
            continue;
        }
        let proto = if below(10) == 0 { "ICMP" } else { pick(&PROTOCOLS) };
        let packet = Packet { from, to, proto, port: 78 + below(8) as u16 };
        let expected = allows(world, &packet);
        let found = accepts(model.rules(), "forward", &packet);
        assert_eq!(
            found,
            expected,
            "{packet:?}\n{}\n{:#?}\n{:#?}",
            model.rules(),
            world.policies,
            world.pods.keys().collect::<Vec<_>>(),
        );
    }
}

#[test]
fn any_cluster_is_judged_as_the_api_says() {
    for _ in 0..WORLDS {
        let (mut world, mut model) = (World::default(), Model::default());
        for _ in 0..CHANGES {
            let change = world.change();
            world.tell(&mut model, &change);
            // As if it were sent to the kernel.
            model.live().take();
        }
        judge(&world, &model);
        let fresh = world.fresh();
        assert_eq!(model.rules(), fresh.rules(), "{}\n{}", model.rules(), fresh.rules());
    }
}
