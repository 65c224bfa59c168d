{{/* What a member needs beyond TCP when pages travel by RDMA. All take the root, where not said otherwise. */}}

{{/* IPC_LOCK lets the process pin the pages that the device reads and writes. */}}
{{- define "tandem.memberSecurityContext" -}}
{{- $context := deepCopy .Values.containerSecurityContext -}}
{{- if .Values.rdma.enabled -}}
{{- $capabilities := $context.capabilities | default dict -}}
{{- $_ := set $capabilities "add" (concat ($capabilities.add | default list) (list "IPC_LOCK") | uniq) -}}
{{- $_ := set $context "capabilities" $capabilities -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* The pool's own resources and the device. Call with (dict "root" $ "role" "decode"). */}}
{{- define "tandem.memberResources" -}}
{{- $resources := deepCopy (get .root.Values .role).resources -}}
{{- $rdma := .root.Values.rdma -}}
{{- if $rdma.enabled -}}
{{- $limits := $resources.limits | default dict -}}
{{- $_ := set $limits $rdma.resourceName (int $rdma.resourceCount | toString) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "tandem.rdmaEnv" -}}
{{- if .Values.rdma.enabled -}}
{{- range $name, $value := .Values.rdma.ucx }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}
{{- end -}}
