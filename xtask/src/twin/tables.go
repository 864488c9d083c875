// Prints where upstream's validation sees an object: writes copies of its packages in which each exported
// validation function first hands its objects to a hook, and a test file that sets the hook.
//
// In: the directory of a module, its import path, an empty directory. Out: files in that directory, among them
// overlay.json for `go test -overlay`, and the names of the packages on standard output. When upstream's own tests
// run with it, every object of their tables is written to $TWIN_OUT as JSON, in the version that is served.
// Nothing of upstream is kept: the copies live as long as the run.
package main

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"log"
	"os"
	"path/filepath"
	"sort"
	"strings"
)

const seen = `package %s

// TwinHook gets the objects that a validation function is called with.
var TwinHook func(objects ...any)

func twinSeen(objects ...any) {
	if TwinHook != nil {
		TwinHook(objects...)
	}
}
`

const hook = `package %s

import (
	"encoding/json"
	"os"
	"reflect"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
%s)

func init() {
	scheme := runtime.NewScheme()
%s	codecs := serializer.NewCodecFactory(scheme)
	file, err := os.OpenFile(os.Getenv("TWIN_OUT"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return
	}
	var lock sync.Mutex
	encoded := func(object any) (out json.RawMessage) {
		defer func() {
			if recover() != nil {
				out = nil
			}
		}()
		value := reflect.ValueOf(object)
		if !value.IsValid() || value.Kind() == reflect.Pointer && value.IsNil() {
			return nil
		}
		whole, ok := object.(runtime.Object)
		if !ok {
			// A spec is shown as an object of its kind.
			if value.Kind() == reflect.Pointer {
				value = value.Elem()
			}
			name, isSpec := strings.CutSuffix(value.Type().Name(), "Spec")
			if !isSpec {
				return nil
			}
			for kind, known := range scheme.AllKnownTypes() {
				if kind.Version == runtime.APIVersionInternal && kind.Kind == name && known.PkgPath() == value.Type().PkgPath() {
					made := reflect.New(known)
					made.Elem().FieldByName("Spec").Set(value)
					whole = made.Interface().(runtime.Object)
				}
			}
			if whole == nil {
				return nil
			}
		}
		kinds, _, err := scheme.ObjectKinds(whole.DeepCopyObject())
		if err != nil {
			return nil
		}
		for _, kind := range kinds {
			// Some types are still known by the group that had them first, and is not served.
			if kind.Group == "extensions" {
				continue
			}
			for _, version := range scheme.PrioritizedVersionsForGroup(kind.Group) {
				bytes, err := runtime.Encode(codecs.LegacyCodec(schema.GroupVersion(version)), whole.DeepCopyObject())
				if err == nil {
					return json.RawMessage(strings.TrimSpace(string(bytes)))
				}
			}
		}
		return nil
	}
	TwinHook = func(objects ...any) {
		var all []json.RawMessage
		for _, object := range objects {
			if text := encoded(object); text != nil {
				all = append(all, text)
			}
		}
		if len(all) == 0 {
			return
		}
		line, err := json.Marshal(all)
		if err != nil {
			return
		}
		lock.Lock()
		defer lock.Unlock()
		file.Write(append(line, '\n'))
	}
}
`

func main() {
	module, path, out := os.Args[1], os.Args[2], os.Args[3]
	overlay := map[string]string{}
	// Directories of the module itself: a replaced module has its files elsewhere.
	directories, _ := filepath.Glob(filepath.Join(module, "pkg/apis/*/validation"))
	installs, _ := filepath.Glob(filepath.Join(module, "pkg/apis/*/install"))
	var imports, calls strings.Builder
	for at, install := range installs {
		inner, _ := filepath.Rel(module, install)
		fmt.Fprintf(&imports, "\tinstall%d %q\n", at, path+"/"+inner)
		fmt.Fprintf(&calls, "\tinstall%d.Install(scheme)\n", at)
	}
	for number, directory := range directories {
		place := filepath.Join(out, fmt.Sprint(number))
		if err := os.MkdirAll(place, 0o700); err != nil {
			log.Fatal(err)
		}
		name, hooked := hookAll(directory, place, overlay)
		if !hooked {
			continue
		}
		write(filepath.Join(place, "zz_twin.go"), fmt.Sprintf(seen, name))
		write(filepath.Join(place, "zz_twin_test.go"), fmt.Sprintf(hook, name, imports.String(), calls.String()))
		overlay[filepath.Join(directory, "zz_twin.go")] = filepath.Join(place, "zz_twin.go")
		overlay[filepath.Join(directory, "zz_twin_test.go")] = filepath.Join(place, "zz_twin_test.go")
		inner, _ := filepath.Rel(module, directory)
		fmt.Println(path + "/" + inner)
	}
	text, err := json.Marshal(map[string]any{"Replace": overlay})
	if err != nil {
		log.Fatal(err)
	}
	write(filepath.Join(out, "overlay.json"), string(text))
}

func write(path, text string) {
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		log.Fatal(err)
	}
}

// hookAll copies the files of a package with a call at the start of each validation function.
func hookAll(directory, place string, overlay map[string]string) (name string, hooked bool) {
	files, _ := filepath.Glob(filepath.Join(directory, "*.go"))
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			log.Fatal(err)
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, path, text, 0)
		if err != nil {
			log.Fatal(err)
		}
		name = file.Name.Name
		type insertion struct {
			at   int
			text string
		}
		var insertions []insertion
		for _, declaration := range file.Decls {
			function, ok := declaration.(*ast.FuncDecl)
			if !ok || function.Recv != nil || !strings.HasPrefix(function.Name.Name, "Validate") || function.Body == nil {
				continue
			}
			if words := objects(function); words != "" {
				at := set.Position(function.Body.Lbrace).Offset + 1
				insertions = append(insertions, insertion{at, " twinSeen(" + words + ");"})
			}
		}
		if len(insertions) == 0 {
			continue
		}
		sort.Slice(insertions, func(a, b int) bool { return insertions[a].at > insertions[b].at })
		changed := string(text)
		for _, it := range insertions {
			changed = changed[:it.at] + it.text + changed[it.at:]
		}
		copied := filepath.Join(place, filepath.Base(path))
		write(copied, changed)
		overlay[path] = copied
		hooked = true
	}
	return name, hooked
}

// objects names the first parameters that are pointers to a type of another package, or a spec: an object, and an
// older one.
func objects(function *ast.FuncDecl) string {
	var words []string
	for _, field := range function.Type.Params.List {
		if !isObject(field.Type) {
			break
		}
		for _, parameter := range field.Names {
			if parameter.Name == "_" || len(words) == 2 {
				return strings.Join(words, ", ")
			}
			words = append(words, parameter.Name)
		}
	}
	return strings.Join(words, ", ")
}

func isObject(given ast.Expr) bool {
	if star, ok := given.(*ast.StarExpr); ok {
		_, ok := star.X.(*ast.SelectorExpr)
		return ok
	}
	selector, ok := given.(*ast.SelectorExpr)
	return ok && strings.HasSuffix(selector.Sel.Name, "Spec")
}
