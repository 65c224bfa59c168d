{{/* One pool: a Deployment and the headless Service by which routers find its members. Call with (dict "root" $ "role" "decode"). */}}
{{- define "tandem.pool" -}}
{{- $values := .root.Values -}}
{{- $pool := get $values .role -}}
{{- $own := dict "root" .root "role" .role "port" $values.memberPort -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "tandem.fullname" .root }}-{{ .role }}
  labels:
    {{- include "tandem.labels" $own | nindent 4 }}
spec:
  {{- with include "tandem.replicas" $own }}
  {{- . | nindent 2 }}
  {{- end }}
  progressDeadlineSeconds: {{ include "tandem.progressSeconds" $own }}
  strategy:
    {{- include "tandem.strategy" $own | nindent 4 }}
  selector:
    matchLabels:
      {{- include "tandem.selectorLabels" $own | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "tandem.podLabels" $own | nindent 8 }}
      {{- with $pool.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      {{- include "tandem.podSpec" $own | nindent 6 }}
      {{- with include "tandem.initContainers" $own }}
      {{- . | nindent 6 }}
      {{- end }}
      containers:
        - name: {{ .role }}
          image: {{ include "tandem.image" $own | quote }}
          imagePullPolicy: {{ include "tandem.pullPolicy" $own }}
          securityContext:
            {{- toYaml $values.containerSecurityContext | nindent 12 }}
          command: ["python", "-m", "{{ .role }}_svc"]
          args:
            {{- include "tandem.serverArgs" $own | nindent 12 }}
            - "--dtype={{ $values.model.dtype }}"
            - "--weight-quantisation={{ $values.model.weightQuantisation }}"
            {{- with $values.model.adapters }}
            - "--adapters={{ join "," . }}"
            {{- end }}
            - "--context-tokens={{ int $values.model.contextTokens }}"
            - "--page-tokens={{ int $values.model.pageTokens }}"
            - "--total-pages={{ int $pool.totalPages }}"
            - "--transport=tcp"
            - "--net-devices={{ $values.transfer.netDevices }}"
            - "--transfer-ports={{ $values.transfer.portRange }}"
            {{- with include "tandem.extraArgs" $own | trim }}
            {{- . | nindent 12 }}
            {{- end }}
          env:
            {{- include "tandem.env" .root | nindent 12 }}
            {{- include "tandem.podEnv" .root | nindent 12 }}
            # Whole cores, rounded up; without a request it is 0, which means one thread for each core of the node.
            - name: TANDEM_THREADS
              valueFrom:
                resourceFieldRef:
                  containerName: {{ .role }}
                  resource: requests.cpu
                  divisor: "1"
            {{- with $pool.extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            - name: grpc
              containerPort: {{ int $values.memberPort }}
            {{- if $values.metrics.enabled }}
            - name: metrics
              containerPort: {{ int $values.metrics.port }}
            {{- end }}
          {{- include "tandem.probes" $own | trim | nindent 10 }}
          {{- with include "tandem.lifecycle" $own }}
          {{- . | nindent 10 }}
          {{- end }}
          resources:
            {{- toYaml $pool.resources | nindent 12 }}
          volumeMounts:
            {{- include "tandem.volumeMounts" .root | nindent 12 }}
            - name: shm
              mountPath: /dev/shm
      volumes:
        {{- include "tandem.volumes" .root | nindent 8 }}
        - name: shm
          emptyDir:
            medium: Memory
            sizeLimit: {{ $pool.shmSize }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ include "tandem.fullname" .root }}-{{ .role }}
  labels:
    {{- include "tandem.labels" $own | nindent 4 }}
spec:
  clusterIP: None
  selector:
    {{- include "tandem.selectorLabels" $own | nindent 4 }}
  ports:
    - name: grpc
      port: {{ int $values.memberPort }}
      targetPort: grpc
      appProtocol: kubernetes.io/h2c
{{- end -}}
