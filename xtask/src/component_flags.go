// Prints the command-line flags of one of Kubernetes' components as the component itself registers them:
// name, type, shorthand, the value of the bare flag, and whether it is deprecated, separated by tabs.
package main

import (
	goflag "flag"
	"fmt"
	"os"
	"sort"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/wait"
	cloud "k8s.io/cloud-provider/app"
	cloudnames "k8s.io/cloud-provider/names"
	cloudoptions "k8s.io/cloud-provider/options"
	"k8s.io/component-base/cli/flag"
	_ "k8s.io/component-base/logs/json/register"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app/options"
)

func main() {
	set, err := flags(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	lines := []string{}
	set.VisitAll(func(one *pflag.Flag) {
		lines = append(lines, fmt.Sprintf("%s\t%s\t%s\t%s\t%t\n",
			one.Name, one.Value.Type(), one.Shorthand, one.NoOptDefVal, one.Deprecated != ""))
	})
	sort.Strings(lines)
	for _, line := range lines {
		fmt.Print(line)
	}
}

func flags(component string) (*pflag.FlagSet, error) {
	switch component {
	case "kube-apiserver":
		return all(apiserver.NewAPIServerCommand()), nil
	case "kube-controller-manager":
		return all(manager.NewControllerManagerCommand()), nil
	case "kube-scheduler":
		return all(scheduler.NewSchedulerCommand()), nil
	case "kube-proxy":
		return all(proxy.NewProxyCommand()), nil
	case "kubelet":
		return ofKubelet()
	case "cloud-controller-manager":
		return ofCloud()
	}
	return nil, fmt.Errorf("unknown component %q", component)
}

func all(command *cobra.Command) *pflag.FlagSet {
	command.InitDefaultHelpFlag()
	set := pflag.NewFlagSet(command.Name(), pflag.ContinueOnError)
	command.LocalFlags().VisitAll(func(one *pflag.Flag) {
		// Of cAdvisor, which the kubelet brings into this program, kube-proxy links only the two that
		// name files of the machine.
		foreign := goflag.CommandLine.Lookup(one.Name) != nil
		if !foreign || one.Name == "machine_id_file" || one.Name == "boot_id_file" ||
			one.Name == "machine-id-file" || one.Name == "boot-id-file" {
			set.AddFlag(one)
		}
	})
	return set
}

// The kubelet's command parses its flags itself and shows none.
func ofKubelet() (*pflag.FlagSet, error) {
	config, err := kubelet.NewKubeletConfiguration()
	if err != nil {
		return nil, err
	}
	set := pflag.NewFlagSet("kubelet", pflag.ContinueOnError)
	set.SetNormalizeFunc(flag.WordSepNormalizeFunc)
	kubelet.NewKubeletFlags().AddFlags(set)
	kubelet.AddKubeletConfigFlags(set, config)
	kubelet.AddGlobalFlags(set)
	set.BoolP("help", "h", false, "")
	return set, nil
}

func ofCloud() (*pflag.FlagSet, error) {
	options, err := cloudoptions.NewCloudControllerManagerOptions()
	if err != nil {
		return nil, err
	}
	return all(cloud.NewCloudControllerManagerCommand(options, nil, cloud.DefaultInitFuncConstructors,
		cloudnames.CCMControllerAliases(), flag.NamedFlagSets{}, wait.NeverStop)), nil
}
