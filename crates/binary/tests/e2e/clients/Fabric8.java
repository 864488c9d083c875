// The fabric8 client at work: informer, apply, scale, exec, port-forward, delete.
//
// In: a kubeconfig in KUBECONFIG; the name of an image on the node. Out: a line per step; exit code 1, with a
// trace, at the first unexpected result. It works in its own namespace and leaves nothing. Its watches are WebSockets.

import io.fabric8.kubernetes.api.model.ConfigMap;
import io.fabric8.kubernetes.api.model.ConfigMapBuilder;
import io.fabric8.kubernetes.api.model.NamespaceBuilder;
import io.fabric8.kubernetes.api.model.apps.Deployment;
import io.fabric8.kubernetes.api.model.apps.DeploymentBuilder;
import io.fabric8.kubernetes.client.KubernetesClient;
import io.fabric8.kubernetes.client.KubernetesClientBuilder;
import io.fabric8.kubernetes.client.KubernetesClientException;
import io.fabric8.kubernetes.client.LocalPortForward;
import io.fabric8.kubernetes.client.dsl.ExecWatch;
import io.fabric8.kubernetes.client.informers.ResourceEventHandler;
import io.fabric8.kubernetes.client.informers.SharedIndexInformer;
import java.io.ByteArrayOutputStream;
import java.io.InputStream;
import java.net.Socket;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

public class Fabric8 {
  static final String SPACE = "client-fabric8";
  static final int LIMIT = 60;
  static final String SERVE =
      "mkdir /www; echo here > /www/index.html; exec httpd -f -p 8080 -h /www";

  static void check(boolean holds, Object found) {
    if (!holds) throw new AssertionError(found);
  }

  static void namespace(KubernetesClient client) {
    var space = new NamespaceBuilder().withNewMetadata().withName(SPACE).endMetadata().build();
    client.resource(space).create();
    client.serviceAccounts().inNamespace(SPACE).withName("default")
        .waitUntilCondition(found -> found != null, LIMIT, TimeUnit.SECONDS);
  }

  static ConfigMap settings(String value) {
    return new ConfigMapBuilder().withNewMetadata().withName("told").withNamespace(SPACE)
        .endMetadata().withData(Map.of("a", value)).build();
  }

  // It lists, watches, and gets a change and a deletion.
  static void informer(KubernetesClient client) throws Exception {
    BlockingQueue<String> heard = new LinkedBlockingQueue<>();
    var maps = client.configMaps().inNamespace(SPACE);
    try (SharedIndexInformer<ConfigMap> informer = maps.inform(new ResourceEventHandler<ConfigMap>() {
      void say(String verb, ConfigMap map) {
        if (map.getMetadata().getName().equals("told")) heard.add(verb);
      }
      @Override public void onAdd(ConfigMap map) { say("add", map); }
      @Override public void onUpdate(ConfigMap old, ConfigMap map) { say("update", map); }
      @Override public void onDelete(ConfigMap map, boolean unknown) { say("delete", map); }
    })) {
      check(informer.hasSynced(), "the informer has not listed");
      maps.resource(settings("1")).create();
      check("add".equals(heard.poll(LIMIT, TimeUnit.SECONDS)), heard);
      maps.resource(settings("2")).update();
      check("update".equals(heard.poll(LIMIT, TimeUnit.SECONDS)), heard);
      maps.withName("told").delete();
      check("delete".equals(heard.poll(LIMIT, TimeUnit.SECONDS)), heard);
    }
  }

  static void apply(KubernetesClient client) {
    var maps = client.configMaps().inNamespace(SPACE);
    maps.resource(settings("1")).fieldManager("one").serverSideApply();
    try {
      maps.resource(settings("2")).fieldManager("two").serverSideApply();
      throw new AssertionError("a conflict was expected");
    } catch (KubernetesClientException conflict) {
      check(conflict.getCode() == 409, conflict);
    }
    var forced =
        maps.resource(settings("2")).fieldManager("two").forceConflicts().serverSideApply();
    check(forced.getData().get("a").equals("2"), forced);
  }

  static void scale(KubernetesClient client, String image) {
    Deployment web = new DeploymentBuilder()
        .withNewMetadata().withName("web").withNamespace(SPACE).endMetadata()
        .withNewSpec().withReplicas(1)
        .withNewSelector().addToMatchLabels("app", "web").endSelector()
        .withNewTemplate()
        .withNewMetadata().addToLabels("app", "web").endMetadata()
        .withNewSpec().withTerminationGracePeriodSeconds(0L)
        .addNewContainer().withName("main").withImage(image)
        .withCommand("sh", "-c", SERVE).endContainer()
        .endSpec().endTemplate().endSpec().build();
    client.resource(web).create();
    client.resource(web).waitUntilReady(LIMIT, TimeUnit.SECONDS);
    var deployment = client.apps().deployments().inNamespace(SPACE).withName("web");
    deployment.scale(2);
    deployment.waitUntilCondition(
        found -> Integer.valueOf(2).equals(found.getStatus().getReadyReplicas()), LIMIT, TimeUnit.SECONDS);
  }

  static String pod(KubernetesClient client) {
    return client.pods().inNamespace(SPACE).withLabel("app", "web").list().getItems().get(0)
        .getMetadata().getName();
  }

  static void exec(KubernetesClient client) throws Exception {
    var out = new ByteArrayOutputStream();
    var pod = client.pods().inNamespace(SPACE).withName(pod(client));
    try (ExecWatch ran = pod.writingOutput(out).exec("sh", "-c", "echo from inside; exit 3")) {
      check(ran.exitCode().get(LIMIT, TimeUnit.SECONDS) == 3, ran.exitCode());
    }
    check(out.toString().equals("from inside\n"), out);
  }

  // Reads to the end: the pod's server closes, and so does the connection.
  static void forward(KubernetesClient client) throws Exception {
    try (LocalPortForward port =
            client.pods().inNamespace(SPACE).withName(pod(client)).portForward(8080);
        Socket near = new Socket("127.0.0.1", port.getLocalPort())) {
      near.setSoTimeout(LIMIT * 1000);
      near.getOutputStream().write("GET / HTTP/1.0\r\n\r\n".getBytes());
      InputStream answer = near.getInputStream();
      String heard = new String(answer.readAllBytes());
      check(heard.endsWith("\r\n\r\nhere\n"), heard);
    }
  }

  static void ending(KubernetesClient client) {
    var space = client.namespaces().withName(SPACE);
    space.delete();
    space.waitUntilCondition(found -> found == null, LIMIT, TimeUnit.SECONDS);
  }

  interface Step {
    void run() throws Exception;
  }

  static void step(String name, Step step) throws Exception {
    step.run();
    System.out.println(name);
  }

  public static void main(String[] arguments) throws Exception {
    try (KubernetesClient client = new KubernetesClientBuilder().build()) {
      step("namespace", () -> namespace(client));
      step("informer", () -> informer(client));
      step("apply", () -> apply(client));
      step("scale", () -> scale(client, arguments[0]));
      step("exec", () -> exec(client));
      step("forward", () -> forward(client));
      step("ending", () -> ending(client));
    }
    System.exit(0);
  }
}
