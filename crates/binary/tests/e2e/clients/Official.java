// The official Java client at work: informer, apply, scale, exec, port-forward, delete.
//
// In: a kubeconfig in KUBECONFIG; the name of an image on the node. Out: a line per step; exit code 1, with a
// trace, at the first unexpected result. It works in its own namespace and leaves nothing. It
// creates pods without reading their status: this release refuses unknown fields.

import io.kubernetes.client.Exec;
import io.kubernetes.client.PortForward;
import io.kubernetes.client.custom.V1Patch;
import io.kubernetes.client.informer.ResourceEventHandler;
import io.kubernetes.client.informer.SharedInformerFactory;
import io.kubernetes.client.openapi.ApiClient;
import io.kubernetes.client.openapi.ApiException;
import io.kubernetes.client.openapi.apis.AppsV1Api;
import io.kubernetes.client.openapi.apis.CoreV1Api;
import io.kubernetes.client.openapi.models.V1ConfigMap;
import io.kubernetes.client.openapi.models.V1ConfigMapList;
import io.kubernetes.client.openapi.models.V1Deployment;
import io.kubernetes.client.openapi.models.V1Namespace;
import io.kubernetes.client.openapi.models.V1ObjectMeta;
import io.kubernetes.client.util.CallGeneratorParams;
import io.kubernetes.client.util.Config;
import io.kubernetes.client.util.PatchUtils;
import io.kubernetes.client.util.Yaml;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.Callable;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

public class Official {
  static final String SPACE = "client-java";
  static final int LIMIT = 60;
  static final String WEB = """
      apiVersion: apps/v1
      kind: Deployment
      metadata: {name: web, namespace: client-java}
      spec:
        replicas: 1
        selector: {matchLabels: {app: web}}
        template:
          metadata: {labels: {app: web}}
          spec:
            terminationGracePeriodSeconds: 0
            containers:
            - name: main
              image: IMAGE
              command: [sh, -c, "mkdir /www; echo here > /www/index.html; exec httpd -f -p 8080 -h /www"]
      """;

  static void check(boolean holds, Object found) {
    if (!holds) throw new AssertionError(found);
  }

  // This client cannot wait for a condition.
  static void soon(String what, Callable<Boolean> holds) throws Exception {
    for (int second = 0; second < LIMIT; second++) {
      if (holds.call()) return;
      TimeUnit.SECONDS.sleep(1);
    }
    throw new AssertionError(what);
  }

  static V1ConfigMap settings(String value) {
    return new V1ConfigMap().apiVersion("v1").kind("ConfigMap")
        .metadata(new V1ObjectMeta().name("told").namespace(SPACE)).data(Map.of("a", value));
  }

  // It lists, watches, and gets a change and a deletion.
  static void informer(ApiClient client, CoreV1Api core) throws Exception {
    BlockingQueue<String> heard = new LinkedBlockingQueue<>();
    var factory = new SharedInformerFactory(client);
    var informer = factory.sharedIndexInformerFor(
        (CallGeneratorParams params) -> core.listNamespacedConfigMap(SPACE)
            .resourceVersion(params.resourceVersion).timeoutSeconds(params.timeoutSeconds)
            .watch(params.watch).buildCall(null),
        V1ConfigMap.class, V1ConfigMapList.class);
    informer.addEventHandler(new ResourceEventHandler<V1ConfigMap>() {
      void say(String verb, V1ConfigMap map) {
        if (map.getMetadata().getName().equals("told")) heard.add(verb);
      }
      @Override public void onAdd(V1ConfigMap map) { say("add", map); }
      @Override public void onUpdate(V1ConfigMap old, V1ConfigMap map) { say("update", map); }
      @Override public void onDelete(V1ConfigMap map, boolean unknown) { say("delete", map); }
    });
    factory.startAllRegisteredInformers();
    soon("the informer has not listed", informer::hasSynced);
    core.createNamespacedConfigMap(SPACE, settings("1")).execute();
    check("add".equals(heard.poll(LIMIT, TimeUnit.SECONDS)), heard);
    core.replaceNamespacedConfigMap("told", SPACE, settings("2")).execute();
    check("update".equals(heard.poll(LIMIT, TimeUnit.SECONDS)), heard);
    core.deleteNamespacedConfigMap("told", SPACE).execute();
    check("delete".equals(heard.poll(LIMIT, TimeUnit.SECONDS)), heard);
    factory.stopAllRegisteredInformers();
  }

  static V1ConfigMap apply(
      ApiClient client, CoreV1Api core, String value, String manager, boolean force)
      throws ApiException {
    var patch = new V1Patch(Yaml.dump(settings(value)));
    return PatchUtils.patch(V1ConfigMap.class,
        () -> core.patchNamespacedConfigMap("told", SPACE, patch)
            .fieldManager(manager).force(force).buildCall(null),
        V1Patch.PATCH_FORMAT_APPLY_YAML, client);
  }

  static void apply(ApiClient client, CoreV1Api core) throws Exception {
    apply(client, core, "1", "one", false);
    try {
      apply(client, core, "2", "two", false);
      throw new AssertionError("a conflict was expected");
    } catch (ApiException conflict) {
      check(conflict.getCode() == 409, conflict);
    }
    check(apply(client, core, "2", "two", true).getData().get("a").equals("2"), "forced");
  }

  static void scale(ApiClient client, AppsV1Api apps, String image) throws Exception {
    var web = (V1Deployment) Yaml.load(WEB.replace("IMAGE", image));
    apps.createNamespacedDeployment(SPACE, web).execute();
    var more = new V1Patch("{\"spec\": {\"replicas\": 2}}");
    PatchUtils.patch(io.kubernetes.client.openapi.models.V1Scale.class,
        () -> apps.patchNamespacedDeploymentScale("web", SPACE, more).buildCall(null),
        V1Patch.PATCH_FORMAT_STRATEGIC_MERGE_PATCH, client);
    soon("two replicas", () -> {
      var status = apps.readNamespacedDeployment("web", SPACE).execute().getStatus();
      return Integer.valueOf(2).equals(status.getReadyReplicas());
    });
  }

  // Only by name, without reading the pod's status.
  static String pod(ApiClient client) throws Exception {
    var call = new CoreV1Api(client).listNamespacedPod(SPACE).labelSelector("app=web").buildCall(null);
    try (var answer = call.execute()) {
      var list = com.google.gson.JsonParser.parseString(answer.body().string()).getAsJsonObject();
      var pod = list.getAsJsonArray("items").get(0).getAsJsonObject();
      return pod.getAsJsonObject("metadata").get("name").getAsString();
    }
  }

  static void exec(ApiClient client) throws Exception {
    String[] command = {"sh", "-c", "echo from inside; exit 3"};
    Process ran = new Exec(client).exec(SPACE, pod(client), command, "main", false, false);
    String printed = new String(ran.getInputStream().readAllBytes());
    check(ran.waitFor(LIMIT, TimeUnit.SECONDS) && ran.exitValue() == 3, ran.exitValue());
    check(printed.equals("from inside\n"), printed);
  }

  // Reads to the end: the pod's server closes, and so does the stream.
  static void forward(ApiClient client) throws Exception {
    var ports = new PortForward(client).forward(SPACE, pod(client), List.of(8080));
    var out = ports.getOutboundStream(8080);
    out.write("GET / HTTP/1.0\r\n\r\n".getBytes());
    out.flush();
    String heard = new String(ports.getInputStream(8080).readAllBytes());
    check(heard.endsWith("\r\n\r\nhere\n"), heard);
  }

  static void ending(CoreV1Api core) throws Exception {
    core.deleteNamespace(SPACE).execute();
    soon("the namespace goes", () -> {
      try {
        core.readNamespace(SPACE).execute();
        return false;
      } catch (ApiException gone) {
        return gone.getCode() == 404;
      }
    });
  }

  interface Step {
    void run() throws Exception;
  }

  static void step(String name, Step step) throws Exception {
    step.run();
    System.out.println(name);
  }

  public static void main(String[] arguments) throws Exception {
    ApiClient client = Config.defaultClient();
    client.setReadTimeout(0);
    var core = new CoreV1Api(client);
    var apps = new AppsV1Api(client);
    step("namespace", () -> core.createNamespace(
        new V1Namespace().metadata(new V1ObjectMeta().name(SPACE))).execute());
    step("informer", () -> informer(client, core));
    step("apply", () -> apply(client, core));
    step("scale", () -> scale(client, apps, arguments[0]));
    step("exec", () -> exec(client));
    step("forward", () -> forward(client));
    step("ending", () -> ending(core));
    System.exit(0);
  }
}
